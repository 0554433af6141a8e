"""The certificate beside the golden: two computations of one layer that have to agree.

What is certified can hold one value only, so the same-recipe golden has to hold it as well. Where
it does not, one of the two is wrong, and neither may judge.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenTrace
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.exact_rows import Certain, CertainRows


def disagreement(stages: CertifiedLayer, sums: CertifiedSums, golden: GoldenTrace) -> str | None:
    """The first stage in which certificate and golden hold different values; None: nowhere."""
    for stage, mine, is_certain, theirs in _stages(stages, sums, golden):
        differs = is_certain & (mine != theirs)
        if bool(differs.any()):
            row, column = differs.nonzero()[0].tolist()
            return (
                f"certificate and golden disagree in stage {stage}, in {int(differs.sum())} of "
                f"{differs.numel()} cells; row {row}, column {column}: "
                f"{float(mine[row, column]):g} and {float(theirs[row, column]):g}"
            )
    return None


def _stages(
    stages: CertifiedLayer, sums: CertifiedSums, golden: GoldenTrace
) -> Iterator[tuple[Stage, Tensor, Tensor, Tensor]]:
    """(stage, the certificate's values, which are certain, the golden's), [R, C] each."""
    routes = stages.routes
    yield Stage.PRE_PERMUTE, *_as_read(stages.grouped), golden.dispatched
    gate_up = golden.gate_up.flatten(0, 1)
    yield Stage.GEMM1, routes.gate_up.value, routes.gate_up.is_certain, gate_up
    yield Stage.ACTIVATION, *_as_read(routes.middle), golden.activation.flatten(0, 1)
    yield Stage.GEMM2, *_whole(routes.outputs), golden.expert_output.flatten(0, 1)
    yield Stage.GLUE_OUT, sums.output.value, sums.output.is_certain, golden.output


def _whole(outputs: Sequence[Certain]) -> tuple[Tensor, Tensor]:
    """([R, H] the sum of an expert's shards, which is certain)."""
    if len(outputs) == 1:
        return outputs[0].value, outputs[0].is_certain
    total = torch.stack([shard.value for shard in outputs]).sum(0)
    return total, torch.stack([shard.is_certain for shard in outputs]).all(0)


def _as_read(rows: CertainRows) -> tuple[Tensor, Tensor]:
    """([R, C] codes times the golden's scales, which are certain)."""
    if rows.scale is None:
        return rows.codes, rows.is_certain
    group = rows.codes.shape[1] // rows.scale.shape[1]
    codes = rows.codes.to(torch.float64)
    return codes * rows.scale.repeat_interleave(group, 1), rows.is_certain
