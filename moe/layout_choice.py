"""Slabs or segments: which grouped layout the rows of standard and flashinfer are brought into."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from moe.formats import GemmLayout, QuantRecipe, ScaleFormat
from moe.platforms import GIB, PlatformFacts
from moe.recipes import RECIPES
from moe.row_counts import ceil_div, slab_height

AskedLayout = Literal["auto", "masked", "compact"]

BF16_BYTES: Final = 2
CLAMPED_GROUP: Final = 128
"""Columns of a scale that the masked layout's clamping kernel is compiled for."""
SCALES_A_STORE: Final = 4
COLUMNS_A_THREAD: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout, and a sentence that says why."""

    layout: GemmLayout
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What the choice looks at.

    num_rows           T: rows into the runner, gathered ones and those of slots included
    num_local_experts  L: expert slots of a rank
    hidden_size        H
    intermediate_size  I: columns of a rank's share of an expert
    recipe             number formats
    swiglu_limit       clamp of the gated activation, or None
    platform           facts of the GPU generation
    asked              SGLANG_DEEPGEMM_STANDARD_LAYOUT
    compact_eager      SGLANG_OPT_DG_COMPACT_EAGER
    memory_fraction    SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION
    """

    num_rows: int
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    recipe: QuantRecipe
    swiglu_limit: float | None
    platform: PlatformFacts
    asked: AskedLayout = "auto"
    compact_eager: bool = False
    memory_fraction: float = 0.25


def choose_layout(facts: LayoutFacts) -> LayoutChoice:
    """The first step with an answer, in upstream's order, outside graph capture.

    One step gives way: an asked-for ``masked`` is not overridden for the clamping kernel's sake,
    for the emulation has no such limit, and a rule has refused or noted it already. The reason
    says so.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_should_use_masked_standard_layout.
    """
    found = (choice for step in _STEPS if (choice := step(facts)) is not None)
    return next(found, None) or _by_memory(facts)


def slab_peak_bytes(facts: LayoutFacts) -> int:
    """Bytes of the two neighbouring steps that hold most, in slabs that nothing caps.

    Steps: GEMM1's input, its output, GEMM2's input, its output.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_estimate_masked_standard_layout_peak_bytes.
    """
    into_gemm1 = _quantised_row_bytes(facts, facts.hidden_size)
    gate_up = 2 * facts.intermediate_size * BF16_BYTES
    into_gemm2 = _quantised_row_bytes(facts, facts.intermediate_size)
    output = facts.hidden_size * BF16_BYTES
    row_bytes = max(into_gemm1 + gate_up, gate_up + into_gemm2, into_gemm2 + output)
    return facts.num_local_experts * slab_height(facts.num_rows) * row_bytes


def clamped_slab_problem(
    swiglu_limit: float | None, intermediate_size: int, num_local_experts: int, group: int
) -> str | None:
    """What keeps a clamped activation out of slabs, whatever the recipe; None if nothing does.

    Args:
        swiglu_limit: clamp of the gated activation, or None.
        intermediate_size: I, columns of a rank's share of an expert.
        num_local_experts: L.
        group: columns of an activation scale, 128 where there is none.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_masked_activation_unsupported_reason.
    """
    if swiglu_limit is None:
        return None
    threads, step = intermediate_size // COLUMNS_A_THREAD, SCALES_A_STORE * group
    wants = "the clamping masked kernel wants"
    if threads < num_local_experts:
        return f"{wants} I // 8 >= local experts, {threads} < {num_local_experts}"
    if group != CLAMPED_GROUP:
        return f"{wants} groups of {CLAMPED_GROUP}, the recipe has {group}"
    if intermediate_size % step:
        return f"{wants} I % {step} == 0, I is {intermediate_size}"
    return None


def activation_group(recipe: QuantRecipe) -> int:
    """Columns that one activation scale covers; 128 where a recipe has no scales."""
    return RECIPES[recipe].activation_group or CLAMPED_GROUP


def _quantised_row_bytes(facts: LayoutFacts, columns: int) -> int:
    """A row as a GEMM reads it, its scales included."""
    if facts.recipe is QuantRecipe.BF16:
        return columns * BF16_BYTES
    packed = facts.platform.scale_format(facts.recipe) is ScaleFormat.UE8M0
    scale_bytes = 1 if packed or facts.recipe is QuantRecipe.MXFP8 else 4
    return columns + ceil_div(columns, activation_group(facts.recipe)) * scale_bytes


def _by_platform(facts: LayoutFacts) -> LayoutChoice | None:
    if facts.platform.has_slabs:
        return None
    return _compact(f"{facts.platform.name} has no masked layout for these rows")


def _by_switch(facts: LayoutFacts) -> LayoutChoice | None:
    return _compact("by switch compact_eager") if facts.compact_eager else None


def _by_activation(facts: LayoutFacts) -> LayoutChoice | None:
    problem = _problem_of_slabs(facts)
    if problem is None or facts.asked == "masked":
        return None
    return _compact(f"{problem} (SGLang logs it once)")


def _as_asked(facts: LayoutFacts) -> LayoutChoice | None:
    if facts.asked == "auto":
        return None
    reason, problem = f"{facts.asked}: asked for", _problem_of_slabs(facts)
    if facts.asked == "masked" and problem is not None:
        reason += f"; SGLang would take compact here: {problem}"
    return LayoutChoice(layout=GemmLayout(facts.asked), reason=reason)


def _problem_of_slabs(facts: LayoutFacts) -> str | None:
    return clamped_slab_problem(
        facts.swiglu_limit,
        facts.intermediate_size,
        facts.num_local_experts,
        activation_group(facts.recipe),
    )


_STEPS: Final[tuple[Callable[[LayoutFacts], LayoutChoice | None], ...]] = (
    _by_platform,
    _by_switch,
    _by_activation,
    _as_asked,
)


def _by_memory(facts: LayoutFacts) -> LayoutChoice:
    """Slabs if they fit into a share of the memory that is free at start-up."""
    budget = int(facts.platform.device_bytes * facts.memory_fraction)
    peak = slab_peak_bytes(facts)
    percent = f"{100 * facts.memory_fraction:.3g} % of an empty {facts.platform.device}"
    if peak <= budget:
        reason = f"masked: its slabs peak at {_size(peak)}, within {_size(budget)} ({percent})"
        return LayoutChoice(layout=GemmLayout.MASKED, reason=reason)
    return _compact(f"slabs would peak at {_size(peak)}, over {_size(budget)} ({percent})")


def _compact(why: str) -> LayoutChoice:
    return LayoutChoice(layout=GemmLayout.CONTIG, reason=f"compact: {why}")


def _size(num_bytes: int) -> str:
    """Bytes as MiB or GiB with one decimal."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
