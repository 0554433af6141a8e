"""One rank's weights put together from those that many ranks have prepared: none is drawn again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.trace import StageTensors
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights
from reports.verdict.rows import cat_rows, take_rows
from reports.verdict.subject import Subject


def joined_weights(subject: Subject, experts: Sequence[int]) -> LayerWeights | None:
    """Experts from the ranks that hold them; None where ranks hold parts of matrices.

    Args:
        subject: a forward whose weights were found to be right.
        experts: the logical expert of each slot of the one rank.
    """
    layer = subject.layer
    if layer.layout.moe_tp > 1 or layer.shared is SharedExpertMode.TP_SHARDED:
        return None
    held = [subject.stage(Stage.WEIGHTS, rank) for rank in subject.ranks]
    slots = torch.cat([each["expert_ids"] for each in held]).tolist()
    order = torch.tensor([slots.index(expert) for expert in experts])
    joined: dict[str, Tensor] = {
        name: take_rows(cat_rows([each[name] for each in held]), order)
        for name in held[0]
        if name.startswith("experts.")
    }
    group, shared_group = (layer.weight_group(shared=shared) for shared in (False, True))
    has_shared = "shared.w13.values" in held[0]
    return LayerWeights(
        expert_ids=torch.tensor(experts),
        experts=_experts(joined, "experts", group),
        shared=_experts(held[0], "shared", shared_group) if has_shared else None,
        gate_weight=held[0]["gate_weight"],
        correction_bias=held[0].get("correction_bias"),
        tid2eid=held[0].get("tid2eid"),
    )


def _experts(tensors: StageTensors, name: str, group_size: int) -> ExpertWeights:
    w13, w2 = (
        ExpertMatrix(
            values=tensors[f"{name}.{matrix}.values"],
            scale=tensors.get(f"{name}.{matrix}.scale"),
            group_size=group_size,
        )
        for matrix in ("w13", "w2")
    )
    return ExpertWeights(w13=w13, w2=w2)
