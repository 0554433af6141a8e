"""The certificate of a forward: which stored values have one answer, stage by stage to the output.

The layer is computed once more, in float64 and without the rounding of fp32 scales, from the
inputs on. It depends on what the backend declares, on recipe and layout, and on where the topology
stores partial sums; no trace of the run enters but the experts it chose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF, compounded
from moe.formats import ScaleFormat, SharedExpertMode, Stage
from moe.golden import (
    GROUP_AMAX_FLOOR,
    LOW_LATENCY_AMAX_FLOOR,
    GoldenModel,
    Stores,
    round_bf16,
    stores_of,
)
from reports.verdict.decode import BLOCK
from reports.verdict.exact_rows import (
    SCALE_ROUNDINGS,
    Certain,
    CertainRows,
    Source,
    activated,
    quantised,
    stored_product,
)
from reports.verdict.exact_sums import Conditions
from reports.verdict.layer import JudgedLayer, ScaleForm
from reports.verdict.narrow import narrowest
from reports.verdict.nominal_weights import NominalPair, NominalWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CertainMlp:
    """An expert's stages over some rows.

    gate_up  [R, 2I]
    stored   [R, I] of the activation where its kernel stores it; None
    middle   what GEMM2 reads
    outputs  [R, H] of each shard of the intermediate axis
    """

    gate_up: Certain
    stored: Certain | None
    middle: CertainRows
    outputs: tuple[Certain, ...]


class CertifiedLayer:
    """Values and certainty of every stage of one forward.

    Args:
        layer: facts of the layer.
        model: the same for the golden.
        weights: without the rounding of scales.
        hidden_states: [T, H] bf16, the global token list.
        topk_ids: [T, K] int64 experts of every route, -1 = dropped.
        conditions: takes what was asked.

    Attributes:
        tokens: [T, H] what the layer works on.
        wire: [T, D] what dispatch hands over.
        grouped: [T, D] what GEMM1 reads.
        routes: every route's stages, rows of [T * K].
        shared: what the shared expert reads, and its stages; None where there is none.
    """

    def __init__(
        self,
        layer: JudgedLayer,
        model: GoldenModel,
        weights: NominalWeights,
        hidden_states: Tensor,
        topk_ids: Tensor,
        conditions: Conditions,
    ) -> None:
        self._layer, self._model, self._weights = layer, model, weights
        self.topk_ids, self.conditions = topk_ids, conditions
        raw = hidden_states.to(torch.float64)
        everywhere = torch.ones_like(raw, dtype=torch.bool)
        self.tokens = self._gathered(Certain(raw, everywhere))
        self.wire, self.grouped = self._dispatched()
        self.routes = self._routes()
        source = Certain(raw, everywhere) if model.path.shared_before_gather else self.tokens
        self.shared = self._shared(source)

    def _gathered(self, raw: Certain) -> Certain:
        """[T, H] what the gather in front of the layer leaves."""
        if not self._model.path.gathers_fp8:
            return raw
        rows = self._quantised(raw, ScaleForm(ScaleFormat.FP32, BLOCK))
        assert rows.slack is not None
        spread = rows.slack.repeat_interleave(BLOCK, 1) * rows.value.abs()
        single = round_bf16(rows.value - spread) == round_bf16(rows.value + spread)
        return Certain(round_bf16(rows.value), rows.is_certain & single)

    def _quantised(
        self, stored: Certain, form: ScaleForm, floor: float = GROUP_AMAX_FLOOR
    ) -> CertainRows:
        source = Source(value=stored.value, is_certain=stored.is_certain)
        rows = quantised(source, form, self._layer.arithmetic, floor=floor)
        self.conditions.require("tokens' codes round alike", rows.is_certain)
        return rows

    def _dispatched(self) -> tuple[CertainRows, CertainRows]:
        """([T, D] as dispatch hands it over, as GEMM1 reads it)."""
        layer = self._layer
        missing = layer.expert_hidden_size - layer.hidden_size
        wide = Certain(
            torch.nn.functional.pad(self.tokens.value, (0, missing)),
            torch.nn.functional.pad(self.tokens.is_certain, (0, missing), value=True),
        )
        bf16 = CertainRows.stored(wide.value, wide.is_certain)
        form = layer.scales_of(Stage.PRE_PERMUTE, "rows.hidden_states")
        if layer.bf16_wire or form.scale_format is ScaleFormat.NONE:
            return bf16, self._quantised(wide, form)
        floor = LOW_LATENCY_AMAX_FLOOR if self._model.path.low_latency_wire else GROUP_AMAX_FLOOR
        wire = self._quantised(wide, layer.scales_of(Stage.DISPATCH, "hidden_states"), floor)
        if not layer.requantises:
            return wire, wire
        noise = compounded(SCALE_ROUNDINGS + 1, FP32_ROUNDOFF) * wire.value.abs()
        again = Source(value=wire.value, noise=noise, is_certain=wire.is_certain, ideal=wire.value)
        return wire, quantised(again, form, layer.arithmetic)

    def _routes(self) -> CertainMlp:
        """Every route's row through its expert; rows of [T * K], zeros where a route is dropped.

        Each tensor is in the narrowest dtype that has its values: most were stored as bf16.
        """
        layer, ids = self._layer, self.topk_ids.flatten()
        order = ids.argsort(stable=True)[int((ids < 0).sum()) :]
        experts, counts = torch.unique_consecutive(ids[order], return_counts=True)
        stores = stores_of(layer.activation, layer.gemm_layout, layer.scale_format)
        form = layer.scales_of(Stage.ACTIVATION, "hidden_states")
        if not len(order):
            return self._no_routes(form)
        where, parts = torch.split(order, counts.tolist()), []
        grouped = replace(self.grouped, quantum=self.grouped.quanta)
        for expert, places in zip(experts.tolist(), where, strict=True):
            rows = grouped[places // self.topk_ids.shape[1]]
            part = self._mlp(rows, self._weights.expert(expert), stores, form, layer.layout.moe_tp)
            parts.append(_each(part, narrowest))
        return _joined(parts, where, len(ids))

    def _no_routes(self, form: ScaleForm) -> CertainMlp:
        """Of a forward without a route."""
        layer = self._layer

        def nothing(width: int) -> Certain:
            zeros = torch.zeros(self.topk_ids.numel(), width, dtype=torch.float64)
            return Certain(zeros, torch.ones_like(zeros, dtype=torch.bool))

        middle = nothing(layer.intermediate_size)
        return CertainMlp(
            gate_up=nothing(2 * layer.intermediate_size),
            stored=middle,
            middle=self._quantised(middle, form),
            outputs=(nothing(layer.expert_hidden_size),) * layer.layout.moe_tp,
        )

    def _mlp(
        self, x: CertainRows, pair: NominalPair, stores: Stores, form: ScaleForm, shards: int
    ) -> CertainMlp:
        """Rows through one expert, its second GEMM shard by shard."""
        w13, w2 = pair
        rule, declared = self._layer.activation, self._layer.arithmetic
        gate_up = stored_product(x, w13, Stage.GEMM1, declared, self.conditions)
        source = activated(gate_up, rule, stores, declared)
        self.conditions.require("activation has one value", source.is_certain)
        middle = quantised(source, form, declared)
        self.conditions.require("activations' codes round alike", middle.is_certain)
        width = w2.value.shape[1] // shards
        outputs = tuple(
            stored_product(
                _columns(middle, part), w2.columns(part), Stage.GEMM2, declared, self.conditions
            )
            for part in (slice(shard * width, (shard + 1) * width) for shard in range(shards))
        )
        stored = None if source.noise is not None else Certain(source.value, source.is_certain)
        return CertainMlp(gate_up=gate_up, stored=stored, middle=middle, outputs=outputs)

    def _shared(self, x: Certain) -> tuple[CertainRows, CertainMlp] | None:
        """([T, H] what the shared expert reads, its stages), in shards where ranks hold shards."""
        layer, pair = self._layer, self._weights.shared()
        if pair is None or layer.shared is None:
            return None
        form = layer.scales_of(Stage.TAIL, "shared.input")
        rows = self._quantised(x, form)
        shards = layer.world_size if layer.shared is SharedExpertMode.TP_SHARDED else 1
        return rows, self._mlp(rows, pair, Stores.PRODUCT, form, shards)


def _columns(rows: CertainRows, part: slice) -> CertainRows:
    """A shard of the columns, with its groups."""
    if rows.scale is None:
        return CertainRows.stored(rows.value[:, part], rows.is_certain[:, part])
    group = rows.value.shape[1] // rows.scale.shape[1]
    groups = slice(part.start // group, part.stop // group)
    return CertainRows(
        codes=rows.codes[:, part],
        scale=rows.scale[:, groups],
        value=rows.value[:, part],
        is_certain=rows.is_certain[:, part],
        slack=None if rows.slack is None else rows.slack[:, groups],
        keeps_scale=rows.keeps_scale,
    )


def _each(mlp: CertainMlp, of: Callable[[Tensor], Tensor]) -> CertainMlp:
    """The same of other tensors."""

    def certain(rows: Certain) -> Certain:
        return Certain(of(rows.value), of(rows.is_certain))

    middle = mlp.middle
    return CertainMlp(
        gate_up=certain(mlp.gate_up),
        stored=None if mlp.stored is None else certain(mlp.stored),
        middle=CertainRows(
            codes=of(middle.codes),
            scale=None if middle.scale is None else of(middle.scale),
            value=of(middle.value),
            is_certain=of(middle.is_certain),
            slack=None if middle.slack is None else of(middle.slack),
            keeps_scale=middle.keeps_scale,
        ),
        outputs=tuple(map(certain, mlp.outputs)),
    )


def _tensors(mlp: CertainMlp) -> list[Tensor]:
    """All of them, in the order of ``_each``."""
    found: list[Tensor] = []

    def take(rows: Tensor) -> Tensor:
        found.append(rows)
        return rows

    _each(mlp, take)
    return found


def _joined(parts: Sequence[CertainMlp], places: Sequence[Tensor], num_rows: int) -> CertainMlp:
    """Experts' rows where they belong, in the widest dtype of each tensor; else certain zeros."""
    whole = []
    for rows in zip(*map(_tensors, parts), strict=True):
        dtype = reduce(torch.promote_types, (part.dtype for part in rows))
        room = torch.full((num_rows, rows[0].shape[1]), dtype is torch.bool, dtype=dtype)
        for at, part in zip(places, rows, strict=True):
            room[at] = part.to(dtype)
        whole.append(room)
    in_order = iter(whole)
    return _each(parts[0], lambda _: next(in_order))
