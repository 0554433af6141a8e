"""The facts of a layer that a verdict needs, as plain values."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe.arithmetic import AccumulatorWidths, ArithmeticModel
from moe.formats import (
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    Phase,
    Platform,
    QuantRecipe,
    ScaleFormat,
    SharedExpertMode,
    Stage,
)
from moe.golden import (
    GoldenRouting,
    activation_group,
    middle_group,
    shared_recipe,
    wire_group,
)
from moe.weights import WeightSource
from reports.verdict.decode import BLOCK
from topology.layout import ParallelLayout
from topology.sync import Reducer, SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part ``index`` of ``count`` equal parts of an intermediate axis."""

    index: int
    count: int


class ScaleForm(NamedTuple):
    """How the scales of quantised rows are stored, and how many columns share one.

    group_size  0 where there are none
    """

    scale_format: ScaleFormat
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLayer:
    """What a verdict needs to know about a layer.

    activation     between the GEMMs
    scale_format   of quantised activations and prepared weights; NONE for bf16
    wire_format    of what dispatch quantises; rows with other scales than ``scale_format`` are
                   quantised again in front of GEMM1
    expert_hidden_size  columns of a row between dispatch and combine; ``intermediate_size`` is
                   padded, too
    tokens         tokens of each attention-DP group
    sync           which token stands in which row of which rank
    slot_experts   logical expert of every physical slot, EP rank by EP rank
    shared         where the shared expert is computed; None where there is none
    row_alignment  rows to which an expert's segment is padded
    gathers_fp8    the gather's wire is fp8
    arithmetic     what the GEMM backend declares
    widths         what was measured of it, where inputs are exact and have to be certified
    platform       whose rules hold
    phase          prefill or decode, where a dispatcher's form follows it
    seed           the scenario's, from which twins of the golden draw their orders
    expanded       one row a route (deepep_v2)
    capacity       rows that a rank may send in one dispatch; None: as many as it likes
    bf16_wire      dispatch hands over bf16 whatever the recipe; pre-permute quantises
    caps_slabs     slabs as high as the fullest expert needs
    zeroes_padding  padding of scattered rows is zero
    masks_slots    padded rows of equal DP slots lose their routes after ids are made local
    wide_segments  SM120's own contiguous path: one block more an expert than the routes fill, and
                   the factor multiplies the weighted sum once it is stored
    """

    layout: ParallelLayout
    tokens: tuple[int, ...]
    sync: SyncPlan
    dispatch_format: DispatchFormat
    gemm_layout: GemmLayout
    hidden_size: int
    expert_hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    slot_experts: tuple[int, ...]
    routing: GoldenRouting
    routed_scaling_factor: float
    activation: GatedActivation
    recipe: QuantRecipe
    scale_format: ScaleFormat
    wire_format: ScaleFormat
    shared: SharedExpertMode | None
    row_alignment: int
    arithmetic: ArithmeticModel
    weights: WeightSource
    widths: AccumulatorWidths | None = None
    gathers_fp8: bool = False
    platform: Platform = Platform.SM100
    phase: Phase = Phase.EXTEND
    seed: int = 0
    expanded: bool = False
    capacity: int | None = None
    bf16_wire: bool = False
    caps_slabs: bool = False
    zeroes_padding: bool = False
    masks_slots: bool = False
    wide_segments: bool = False

    @property
    def draws_signs(self) -> bool:
        """Whether errors of a GEMM have signs that nothing has in common.

        Sums that are cut off err to one side. Made to be exact, values lie where an error that many
        cells share takes all of them to the same side.
        """
        return not self.arithmetic.truncates and self.widths is None

    @property
    def factor(self) -> float:
        """The routed scaling factor as kernels hold it: an fp32 number."""
        return float(torch.tensor(self.routed_scaling_factor, dtype=torch.float32))

    @property
    def requantises(self) -> bool:
        """Whether rows are quantised again between dispatch and GEMM1."""
        return not self.bf16_wire and self.wire_format is not self.scale_format

    def scales_of(self, stage: Stage, tensor: str) -> ScaleForm:
        """Format and group of the scales that belong to a tensor of the trace."""
        if stage is Stage.GLUE_IN:
            return ScaleForm(ScaleFormat.FP32, BLOCK)
        if tensor.startswith("shared."):
            group = activation_group(shared_recipe(self.recipe))
        elif stage is Stage.ACTIVATION:
            group = middle_group(self.recipe, self.activation, self.gemm_layout)
        elif self.bf16_wire:
            group = activation_group(self.recipe)
        else:
            group = wire_group(self.recipe, self.dispatch_format)
        of_wire = stage is Stage.DISPATCH and not tensor.startswith("shared.")
        return ScaleForm(self.wire_format if of_wire else self.scale_format, group or 0)

    def weight_group(self, *, shared: bool) -> int:
        """Columns of a row of prepared weights that share a packed scale."""
        in_small_groups = self.recipe is QuantRecipe.MXFP8 or (
            self.recipe is QuantRecipe.MXFP4_W4A8 and not shared
        )
        return 32 if in_small_groups else BLOCK

    @property
    def top_k(self) -> int:
        """Slots of a token."""
        return self.routing.top_k + self.routing.num_fused_shared

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def slots_per_rank(self) -> int:
        """Physical expert slots of one EP rank."""
        return len(self.slot_experts) // self.layout.ep

    @property
    def is_all_to_all(self) -> bool:
        """Whether tokens travel to their experts; otherwise partial results are reduced."""
        return self.dispatch_format is not DispatchFormat.STANDARD

    @property
    def ranks_with_shared_in_tail(self) -> range:
        """Ranks that compute the shared expert in the tail: all, rank 0 before a sum, or none."""
        match self.shared:
            case None | SharedExpertMode.LOCAL:
                return range(0)
            case SharedExpertMode.REPLICATED if self.sync.reducer is Reducer.GLUE_OUT:
                return range(1)
            case _:
                return range(self.world_size)

    def ep_rank(self, rank: int) -> int:
        """Place of a rank among the owners of experts."""
        return self.layout.moe.coord(rank, "ep")

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Logical experts of a rank, in slot order."""
        first = self.ep_rank(rank) * self.slots_per_rank
        return self.slot_experts[first : first + self.slots_per_rank]

    def expert_shard(self, rank: int) -> Shard:
        """The part of every expert's intermediate axis that a rank holds."""
        return Shard(index=self.layout.moe.coord(rank, "tp"), count=self.layout.moe_tp)

    def shared_shard(self, rank: int) -> Shard:
        """The part of the shared expert's intermediate axis that a rank holds."""
        if self.shared is SharedExpertMode.TP_SHARDED:
            return Shard(index=rank, count=self.world_size)
        return Shard(index=0, count=1)
