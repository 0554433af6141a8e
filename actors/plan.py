"""Everything a rank needs to know, as plain values that travel to any process."""

import hashlib
from dataclasses import dataclass, replace

from moe.formats import (
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    Phase,
    QuantRecipe,
    RunnerBackend,
    ScaleFormat,
    SharedExpertMode,
)
from moe.quant.fp8 import GROUP_SIZE
from moe.recipes import RECIPES
from moe.routing import RoutingRule
from moe.weights import WeightSource
from topology.layout import ParallelLayout
from topology.sync import SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer under one topology, every ``auto`` resolved.

    sync             who holds which rows, what gathers and returns them, who reduces
    redundant        physical expert slots beyond one an expert
    shuffled_by      seed of a shuffled placement; None: contiguous
    scale_format     of activations and prepared weights; NONE for bf16
    wire_format      of what dispatch quantises; another than that is quantised again in front of
                     GEMM1
    shared           where the shared expert is computed; None where there is none
    gathers_fp8      the gather's wire is fp8
    row_alignment    rows to which an expert's segment is padded
    expert_hidden_size  columns of a row in front of the experts, padding included
    routed_scaling_factor  the model's, for the formats that fold it into the weighted sum
    tail_scaling_factor    what the tail multiplies by: the same, or 1 where it is folded in
    phase            prefill or decode, where a dispatcher's form follows it
    expanded         one row a route (deepep_v2)
    capacity         rows that a rank may send in one dispatch; None: as many as it likes
    bf16_wire        dispatch hands over bf16 whatever the recipe; pre-permute quantises
    caps_slabs       slabs as high as the fullest expert needs
    zeroes_padding   padding of scattered rows is zero
    masks_slots      padded rows of equal DP slots lose their routes after ids are made local
    gemm             name of the GEMM backend, or package.module:Class
    device           where a rank computes: cpu or cuda
    kernels          who computes what stands between the GEMMs: torch or triton
    wide_segments    SM120's own contiguous path: see ``PermuteContext``
    seed             decides what a contract leaves open, such as arrival order
    """

    layout: ParallelLayout
    sync: SyncPlan
    num_experts: int
    redundant: int
    shuffled_by: int | None
    routing: RoutingRule
    dispatch_format: DispatchFormat
    gemm_layout: GemmLayout
    runner: RunnerBackend
    recipe: QuantRecipe
    scale_format: ScaleFormat
    wire_format: ScaleFormat
    shared: SharedExpertMode | None
    gathers_fp8: bool
    row_alignment: int
    activation: GatedActivation
    expert_hidden_size: int
    routed_scaling_factor: float
    tail_scaling_factor: float
    weights: WeightSource
    seed: int
    phase: Phase = Phase.EXTEND
    expanded: bool = False
    capacity: int | None = None
    bf16_wire: bool = False
    caps_slabs: bool = False
    zeroes_padding: bool = False
    masks_slots: bool = False
    wide_segments: bool = False
    gemm: str = "torch"
    device: str = "cpu"
    kernels: str = "torch"

    @property
    def input_group(self) -> int:
        """Columns that a scale covers in front of GEMM1; 128 where there is none."""
        recipe = RECIPES[self.recipe]
        return recipe.input_group(self.dispatch_format, bf16_wire=self.bf16_wire) or GROUP_SIZE

    @property
    def middle_group(self) -> int:
        """The same in front of GEMM2."""
        return RECIPES[self.recipe].middle_group(self.activation, self.gemm_layout) or GROUP_SIZE

    @property
    def dense_group(self) -> int:
        """The same in the shared expert, on both sides."""
        return RECIPES[RECIPES[self.recipe].shared].activation_group or GROUP_SIZE

    def fingerprint(self) -> int:
        """Equal on two ranks exactly when they were given the same plan."""
        return _digest(repr(self))

    def layer_fingerprint(self) -> int:
        """Equal for plans that differ in who holds which rows alone: the weights are the same."""
        return _digest(repr(replace(self, sync=_nobodys_rows(self.sync))))


def _nobodys_rows(sync: SyncPlan) -> SyncPlan:
    """The same glue with no row anywhere."""
    return replace(sync, entry=(), layer=(), slots=())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
