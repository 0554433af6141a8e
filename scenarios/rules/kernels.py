"""Sizes that the real kernels take; an emulation runs them all, so they are notes by default."""

from typing import Final

from moe.formats import DispatchFormat, GemmLayout, ScaleFormat
from moe.layout_choice import SCALES_A_STORE, activation_group, clamped_slab_problem
from moe.platforms import PLATFORMS
from moe.recipes import RECIPES
from scenarios.rules.dispatch import dispatch_capacity
from scenarios.rules.rule import Rule, RuleKind, Sized, sections

_DEEPEP_LL_HIDDEN: Final = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MOST_CLAMPED_EXPERTS: Final = 256
_SLAB_TILE: Final = 64
_MOST_SCATTERED: Final = 8192  # a thread for every 8 columns, at most 1024 in a block


def _ll_hidden_size(subject: Sized) -> str | None:
    hidden = subject.hidden_size
    if subject.scenario.moe.dispatcher != DispatchFormat.DEEPEP_LL or hidden in _DEEPEP_LL_HIDDEN:
        return None
    return f"hidden_size({hidden}) is none of deepep_ll's {', '.join(map(str, _DEEPEP_LL_HIDDEN))}"


def _ll_packed_scales(subject: Sized) -> str | None:
    scenario, hidden = subject.scenario, subject.hidden_size
    packs = PLATFORMS[scenario.platform].low_latency_scales is ScaleFormat.UE8M0
    quantised = subject.is_quantised and not scenario.moe.switches.deepep_bf16_dispatch
    is_packed = scenario.moe.dispatcher == DispatchFormat.DEEPEP_LL and quantised and packs
    if not is_packed or hidden % 512 == 0:
        return None
    return f"hidden_size({hidden}) is not divisible by 512: deepep_ll packs four scales a word"


def _slab_activation(subject: Sized) -> str | None:
    if not subject.is_quantised or not subject.has_slabs:
        return None
    recipe, width = RECIPES[subject.scenario.moe.recipe], subject.partition
    group = recipe.middle_group(subject.model.activation, GemmLayout.MASKED) or 1
    if width % (SCALES_A_STORE * group) == 0:
        return None
    return f"(I / g) % 4 != 0 with I = {width} a rank, g = {group}: scales are stored in fours"


def _slab_threads(subject: Sized) -> str | None:
    """A thread for each local expert, and no more of them than the kernel is compiled for.

    Where the layout is chosen, the choice itself keeps to the former and never looks at the latter.
    """
    width, local = subject.partition, subject.num_local_experts
    if subject.model.swiglu_limit is None or not subject.is_quantised or not subject.has_slabs:
        return None
    is_chosen = subject.scenario.moe.dispatcher.folds_scaling_factor
    has_threads = is_chosen or (width % 256 == 0 and local <= width // 8)
    if has_threads and local <= _MOST_CLAMPED_EXPERTS:
        return None
    wants = f"I % 256 == 0 and local experts <= I / 8, {_MOST_CLAMPED_EXPERTS}"
    return f"the clamping kernel wants {wants}; I = {width}, {local} experts"


def _asked_slabs(subject: Sized) -> str | None:
    """Upstream's own test, in front of which an asked-for layout counts for nothing."""
    moe = subject.scenario.moe
    if not moe.dispatcher.folds_scaling_factor or moe.layout != "masked":
        return None
    problem = clamped_slab_problem(
        subject.model.swiglu_limit,
        subject.partition,
        subject.num_local_experts,
        activation_group(moe.recipe),
    )
    return problem and f"{problem}: SGLang takes compact although masked is asked for"


def _gather_width(subject: Sized) -> str | None:
    moe, hidden = subject.scenario.moe, subject.hidden_size
    gathers = moe.dispatcher in (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_V2)
    if not gathers or subject.has_slabs or hidden % 128 == 0:
        return None
    return f"ep_gather wants hidden_size({hidden}) to be a multiple of 128"


def _slab_tiles(subject: Sized) -> str | None:
    """Other slabs are as high as SGLang makes them, in steps of 256."""
    scenario = subject.scenario
    capacity = dispatch_capacity(scenario)
    if not subject.has_slabs or capacity is None:
        return None
    ranks = scenario.parallel.moe.ep
    if ranks * capacity % _SLAB_TILE == 0:
        return None
    return (
        f"slabs of {ranks * capacity} rows ({ranks} ranks x {capacity}): DeepGEMM's masked kernels "
        f"write whole tiles of {_SLAB_TILE} rows, over the next slab's first ones, too; "
        "moe.switches.max_dispatch_tokens_per_rank changes that"
    )


def _slab_scatter(subject: Sized) -> str | None:
    scenario, hidden = subject.scenario, subject.hidden_size
    scatters = scenario.moe.dispatcher.folds_scaling_factor and subject.has_slabs
    packs = PLATFORMS[scenario.platform].scale_format(scenario.moe.recipe) is ScaleFormat.UE8M0
    step = SCALES_A_STORE * activation_group(scenario.moe.recipe)
    if not scatters or not packs or (hidden % step == 0 and hidden <= _MOST_SCATTERED):
        return None
    wants = f"% {step} == 0 and <= {_MOST_SCATTERED}"
    return f"the quantise-and-scatter kernel wants hidden_size({hidden}) {wants}"


_OF_THE_LAYOUT: Final = sections("moe", "batch", "parallel", "platform")

KERNEL_RULES: Final[tuple[Rule[Sized], ...]] = (
    Rule(
        name="deepep_ll_hidden_sizes",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=sections("moe"),
        check=_ll_hidden_size,
        source="DeepEP, csrc/kernels/launch.cuh::SWITCH_HIDDEN",
    ),
    Rule(
        name="deepep_ll_packs_scales_in_fours",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=sections("moe", "platform"),
        check=_ll_packed_scales,
        source="DeepEP, csrc/kernels/internode_ll.cu",
    ),
    Rule(
        name="slab_scales_come_in_fours",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=_OF_THE_LAYOUT,
        check=_slab_activation,
        source="SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh",
    ),
    Rule(
        name="clamping_kernel_threads",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=_OF_THE_LAYOUT,
        check=_slab_threads,
        source="SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh",
    ),
    Rule(
        name="clamped_rows_may_lie_in_slabs",
        kind=RuleKind.KERNEL_SHAPE,
        field="moe.layout",
        reads=sections("moe", "parallel"),
        check=_asked_slabs,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py::_masked_activation_unsupported_reason",
    ),
    Rule(
        name="slabs_are_whole_tiles",
        kind=RuleKind.KERNEL_SHAPE,
        field="moe.switches.max_dispatch_tokens_per_rank",
        reads=_OF_THE_LAYOUT,
        check=_slab_tiles,
        source="sgl-deep-gemm 0.1.2 on an H200: slabs of 16, 32 and 96 rows come back wrong",
    ),
    Rule(
        name="ep_gather_width",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=_OF_THE_LAYOUT,
        check=_gather_width,
        source="SGLang 0.5.21, kernels/ops/moe/ep_moe_kernels.py::ep_gather",
    ),
    Rule(
        name="quantise_and_scatter_width",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=_OF_THE_LAYOUT,
        check=_slab_scatter,
        source="SGLang 0.5.21, kernels/ops/moe/ep_moe_kernels.py::moe_ep_deepgemm_preprocess",
    ),
)
