"""What stands around the MoE on one rank: rows gathered or split before it, returned after it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.quant.fp8 import QuantizedRows, dequantize_groups, quantize_groups
from moe.stages import GlueInOutput
from topology.collectives import Collectives, expect_rows
from topology.layout import ParallelLayout
from topology.splits import tensor_split_sizes
from topology.sync import Gather, Return, SyncPlan


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatherWire:
    """How gathered rows travel where they do not travel as they are: lossy, before routing.

    quantize    [T, H] bf16 -> codes and scales
    dequantize  codes, scales -> [T, H] fp32
    """

    quantize: Callable[[Tensor], QuantizedRows]
    dequantize: Callable[[Tensor, Tensor], Tensor]


FP8_WIRE: Final = GatherWire(
    quantize=partial(quantize_groups, scale_format=ScaleFormat.FP32),
    dequantize=dequantize_groups,
)
"""Groups of 128 columns with fp32 scales.

Source: SGLang 0.5.21, layers/dp_attention.py (SGLANG_ENABLE_DP_GATHER_FP8).
"""


@dataclass(frozen=True, slots=True, eq=False)
class Glue:
    """Carries a plan out for one rank; a rank without rows makes every call, too.

    plan, layout  the glue and the topology it was made for
    collectives   this rank's verbs
    wire          acts on the variable-length gather alone, as upstream's switch does

    Source: SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync.
    """

    plan: SyncPlan
    layout: ParallelLayout
    collectives: Collectives
    wire: GatherWire | None = None

    def enter(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> GlueInOutput:
        """The rows this rank's layer works on.

        Args:
            hidden_states: [T, H] bf16, the rank's entry rows; never written to.
            input_ids: [T] int64 of the same rows, for hash layers; 0 on padding rows.

        Raises:
            CollectiveMismatchError: not as many rows as the plan has, or ranks disagree.
        """
        ids = None if input_ids is None else self._own_checked(input_ids)
        rows = self._own_checked(hidden_states)
        if self.wire is not None and self.plan.gather is Gather.ALL_GATHER_V:
            return self._enter_quantized(self.wire, rows, ids)
        return GlueInOutput(
            own=hidden_states,
            hidden_states=self._gather(rows),
            input_ids=None if ids is None else self._gather(ids),
        )

    def leave(self, rows: Tensor) -> Tensor:
        """This rank's entry rows again, out of the layer's.

        Args:
            rows: [T, H] bf16, the layer's rows: summed over the ranks, or this rank's summand
                where the plan reduces here.

        Raises:
            CollectiveMismatchError: not as many rows as the plan has, or ranks disagree.
        """
        expect_rows("glue_out", rows, len(self.plan.layer[self.collectives.rank]))
        match self.plan.returning:
            case Return.NONE:
                return rows
            case Return.ALL_GATHER:
                group = self.layout.attention_tp_group(self.collectives.rank)
                return self.collectives.all_gather_v(rows, self._chunk_sizes(), group)
            case Return.DP_SCATTER:
                start, stop = self._own_slot()
                return rows[start:stop].clone()
            case Return.REDUCE_SCATTER | Return.REDUCE_SCATTER_V:
                return self.collectives.reduce_scatter_v(rows, self.plan.slots, self.layout.world)

    def _own_checked(self, rows: Tensor) -> Tensor:
        expect_rows("glue_in", rows, len(self.plan.entry[self.collectives.rank]))
        return rows

    def _enter_quantized(
        self, wire: GatherWire, rows: Tensor, input_ids: Tensor | None
    ) -> GlueInOutput:
        """Every rank quantises its own rows; all compute with what the wire left of them."""
        sent = wire.quantize(rows)
        values, scale = self._gather(sent.values), self._gather(sent.scale)
        return GlueInOutput(
            own=rows,
            hidden_states=wire.dequantize(values, scale).to(rows.dtype),
            input_ids=None if input_ids is None else self._gather(input_ids),
            wire=sent.values,
            wire_scale=sent.scale,
        )

    def _gather(self, rows: Tensor) -> Tensor:
        """[T, ...] entry rows of any dtype as the layer's rows.

        Source: SGLang 0.5.21, layers/dp_attention.py::dp_gather_replicate.
        """
        match self.plan.gather:
            case Gather.NONE:
                return rows
            case Gather.TENSOR_SPLIT:
                return rows.tensor_split(self.layout.attn_tp)[self._attention_tp_rank].clone()
            case Gather.ALL_GATHER | Gather.ALL_GATHER_V:
                return self.collectives.all_gather_v(rows, self.plan.slots, self.layout.world)
            case Gather.ALL_REDUCE:
                return self._zero_and_all_reduce(rows)
            case Gather.REDUCE_SCATTER_ALL_GATHER:
                return self._reduce_scatter_all_gather(rows)

    def _zero_and_all_reduce(self, rows: Tensor) -> Tensor:
        """One rank of each group writes its slot between zeros; the sum has one term a row."""
        gathered = rows.new_zeros((sum(self.plan.slots), *rows.shape[1:]))
        if self._attention_tp_rank == 0:
            start, stop = self._own_slot()
            gathered[start:stop] = rows
        return self.collectives.all_reduce(gathered, self.layout.world)

    def _reduce_scatter_all_gather(self, rows: Tensor) -> Tensor:
        """Equal rows are summed once: all but one of their holders give zeros, then take a part."""
        summand = rows if self._attention_tp_rank == 0 else torch.zeros_like(rows)
        group = self.layout.attention_tp_group(self.collectives.rank)
        chunk = self.collectives.reduce_scatter_v(summand, self._chunk_sizes(), group)
        world = self.layout.world
        return self.collectives.all_gather_v(chunk, [chunk.shape[0]] * len(world), world)

    @property
    def _attention_tp_rank(self) -> int:
        return self.layout.attention.coord(self.collectives.rank, "tp")

    def _chunk_sizes(self) -> tuple[int, ...]:
        """Rows of each attention-TP rank's chunk of the entry rows."""
        num_rows = len(self.plan.entry[self.collectives.rank])
        return tensor_split_sizes(num_rows, self.layout.attn_tp)

    def _own_slot(self) -> tuple[int, int]:
        """First and end row of this rank's attention-DP group among the gathered rows."""
        dp_rank = self.layout.attention.coord(self.collectives.rank, "dp")
        start = sum(self.plan.slots[:dp_rank])
        return start, start + self.plan.slots[dp_rank]
