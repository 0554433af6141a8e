"""Sizes that the real kernels take; an emulation runs them all, so they are notes by default."""

from typing import Final

from moe.formats import DispatchFormat, Platform, QuantRecipe
from scenarios.rules.rule import BLOCK, Rule, RuleKind, Sized, sections

_DEEPEP_LL_HIDDEN: Final = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


def _ll_hidden_size(subject: Sized) -> str | None:
    hidden = subject.model.hidden_size
    if subject.scenario.moe.dispatcher != DispatchFormat.DEEPEP_LL or hidden in _DEEPEP_LL_HIDDEN:
        return None
    return f"hidden_size({hidden}) is none of deepep_ll's {', '.join(map(str, _DEEPEP_LL_HIDDEN))}"


def _ll_packed_scales(subject: Sized) -> str | None:
    scenario, hidden = subject.scenario, subject.model.hidden_size
    packs = scenario.platform == Platform.SM100 and subject.is_quantised
    if scenario.moe.dispatcher != DispatchFormat.DEEPEP_LL or not packs or hidden % 512 == 0:
        return None
    return f"hidden_size({hidden}) is not divisible by 512: deepep_ll packs four scales a word"


def _slab_activation(subject: Sized) -> str | None:
    if not subject.is_quantised or not subject.has_slabs:
        return None
    group = 32 if subject.scenario.moe.recipe == QuantRecipe.MXFP8 else BLOCK
    width = subject.partition
    if width % (4 * group) == 0:
        return None
    return f"(I / g) % 4 != 0 with I = {width} a rank, g = {group}: scales are stored in fours"


def _slab_threads(subject: Sized) -> str | None:
    model, ep = subject.model, subject.scenario.parallel.moe.ep
    clamps = model.swiglu_limit is not None and subject.is_quantised
    width, local = subject.partition, subject.num_physical_experts // ep
    if not clamps or not subject.has_slabs or (width % 256 == 0 and local <= width // 8):
        return None
    return (
        f"the clamping kernel wants I % 256 == 0 and I / 8 >= local experts; I = {width}, {local}"
    )


def _gather_width(subject: Sized) -> str | None:
    moe, hidden = subject.scenario.moe, subject.model.hidden_size
    gathers = moe.dispatcher in (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_V2)
    if not gathers or subject.has_slabs or hidden % 128 == 0:
        return None
    return f"ep_gather wants hidden_size({hidden}) to be a multiple of 128"


def _slab_scatter(subject: Sized) -> str | None:
    scenario, hidden = subject.scenario, subject.model.hidden_size
    slabs = scenario.moe.dispatcher == DispatchFormat.STANDARD and scenario.moe.layout == "masked"
    packs = scenario.platform == Platform.SM100 and subject.is_quantised
    if not slabs or not packs or (hidden % 512 == 0 and hidden <= 8192):
        return None
    return f"the quantise-and-scatter kernel wants hidden_size({hidden}) % 512 == 0 and <= 8192"


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
        reads=sections("moe", "batch", "parallel"),
        check=_slab_activation,
        source="SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh",
    ),
    Rule(
        name="clamping_kernel_threads",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=sections("moe", "batch", "parallel"),
        check=_slab_threads,
        source="SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh",
    ),
    Rule(
        name="ep_gather_width",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=sections("moe", "batch"),
        check=_gather_width,
        source="SGLang 0.5.21, kernels/ops/moe/ep_moe_kernels.py::ep_gather",
    ),
    Rule(
        name="quantise_and_scatter_width",
        kind=RuleKind.KERNEL_SHAPE,
        field="model",
        reads=sections("moe", "platform"),
        check=_slab_scatter,
        source="SGLang 0.5.21, kernels/ops/moe/ep_moe_kernels.py::moe_ep_deepgemm_preprocess",
    ),
)
