"""Rules on what a dispatcher, a layout and a reduction can be combined with; no model size."""

from typing import Final

from moe.formats import DispatchFormat, Phase
from moe.platforms import PLATFORMS
from moe.row_counts import low_latency_slab_problem
from scenarios.layouts import is_expanded
from scenarios.rules.rule import Rule, RuleKind, sections
from scenarios.schema import Scenario

# Rows a rank may send in one dispatch, unless the switch says otherwise.
_DEFAULT_CAPACITY: Final = {
    DispatchFormat.DEEPEP_LL: 128,
    DispatchFormat.MOONCAKE: 128,
    DispatchFormat.NIXL: 128,
    DispatchFormat.DEEPEP_V2: 128,
    DispatchFormat.FLASHINFER: 4096,
}
_LOW_LATENCY_MOST: Final = 1024


def dispatch_capacity(scenario: Scenario) -> int | None:
    """Rows that a rank may send in one dispatch; None: as many as it likes.

    FlashInfer's workspace holds decode's rows alone: prefill gathers them.
    """
    moe = scenario.moe
    if moe.dispatcher is DispatchFormat.FLASHINFER and scenario.batch.phase is Phase.EXTEND:
        return None
    default = _DEFAULT_CAPACITY.get(moe.dispatcher)
    return default and (moe.switches.max_dispatch_tokens_per_rank or default)


def _rows_fit(scenario: Scenario) -> str | None:
    moe, view = scenario.moe, scenario.parallel.attention
    capacity = dispatch_capacity(scenario)
    if capacity is None:
        return None
    # Attention TP and CP deal a group's rows out; the first rank holds the most.
    rows = -(-max(scenario.batch.tokens) // (view.tp * view.cp))
    if rows <= capacity:
        return None
    switch = "moe.switches.max_dispatch_tokens_per_rank"
    return f"a rank sends {rows} rows, {moe.dispatcher} takes {capacity}; {switch} raises that"


def _capacity_fits(scenario: Scenario) -> str | None:
    capacity = scenario.moe.switches.max_dispatch_tokens_per_rank
    if not scenario.moe.dispatcher.is_low_latency or (capacity or 0) <= _LOW_LATENCY_MOST:
        return None
    return f"{capacity} is over {_LOW_LATENCY_MOST}, the most that low-latency tags can count"


def _slabs_come_in_fours(scenario: Scenario) -> str | None:
    ranks, capacity = scenario.parallel.moe.ep, dispatch_capacity(scenario) or 0
    expanded_into_slabs = is_expanded(scenario) and scenario.moe.layout != "compact"
    of_capacity = scenario.moe.dispatcher.is_low_latency or expanded_into_slabs
    return low_latency_slab_problem(ranks, capacity) if of_capacity else None


def _layout_of_dispatcher(scenario: Scenario) -> str | None:
    dispatcher, layout = scenario.moe.dispatcher, scenario.moe.layout
    if dispatcher.is_low_latency and layout == "compact":
        return f"{dispatcher} hands over one slab an expert: use auto or masked"
    has_slabs = dispatcher.is_low_latency or dispatcher is DispatchFormat.DEEPEP_V2
    if layout == "masked" and not has_slabs and not dispatcher.folds_scaling_factor:
        return f"{dispatcher} hands over expert segments, never slabs: use auto or compact"
    return None


def _layout_of_v2(scenario: Scenario) -> str | None:
    moe = scenario.moe
    is_v2 = moe.dispatcher == DispatchFormat.DEEPEP_V2
    if not is_v2 or moe.layout != "masked" or is_expanded(scenario):
        return None
    return "'masked', but deepep_v2 not expanded is 'compact': use auto"


def _layout_of_platform(scenario: Scenario) -> str | None:
    moe, platform = scenario.moe, PLATFORMS[scenario.platform]
    if platform.has_slabs or moe.layout != "masked" or not moe.dispatcher.folds_scaling_factor:
        return None
    return f"{platform.name} never takes the masked layout here: use auto or compact"


def _layout_of_eager(scenario: Scenario) -> str | None:
    moe = scenario.moe
    asks = moe.layout == "masked" and moe.dispatcher.folds_scaling_factor
    if not asks or not moe.switches.compact_eager:
        return None
    return "'masked', but switch compact_eager takes compact before it looks at the layout"


def _expanded_is_v2(scenario: Scenario) -> str | None:
    moe = scenario.moe
    if moe.expanded == "auto" or moe.dispatcher == DispatchFormat.DEEPEP_V2:
        return None
    return f"only deepep_v2 expands rows; with {moe.dispatcher} leave it auto"


def _reduce_is_standard(scenario: Scenario) -> str | None:
    moe = scenario.moe
    if moe.reduce == "auto" or moe.dispatcher == DispatchFormat.STANDARD:
        return None
    return f"{moe.dispatcher}'s combine is the reduction; {moe.reduce!r} would sum again: use auto"


def _shared_is_not_split(scenario: Scenario) -> str | None:
    moe = scenario.moe
    if moe.shared_experts != "tp_sharded" or moe.dispatcher == DispatchFormat.STANDARD:
        return None
    return f"nothing sums the shared expert's shards with {moe.dispatcher}: use auto or replicated"


def _local_shared_is_gathered(scenario: Scenario) -> str | None:
    moe, view = scenario.moe, scenario.parallel.attention
    gathers = moe.dispatcher == DispatchFormat.STANDARD and view.dp > 1 and view.cp == 1
    if moe.shared_experts != "local" or gathers:
        return None
    return "local is before a DP gather: dispatcher standard, attention dp > 1, cp 1; use auto"


DISPATCH_RULES: Final[tuple[Rule[Scenario], ...]] = (
    Rule(
        name="rows_fit_the_dispatch_buffer",
        kind=RuleKind.SEMANTIC,
        field="batch.tokens",
        reads=sections("parallel", "moe", "batch"),
        check=_rows_fit,
        source="SGLang 0.5.21, layers/moe/token_dispatcher: deepep.py, deepep_v2.py, flashinfer.py",
    ),
    Rule(
        name="capacity_fits_the_low_latency_tags",
        kind=RuleKind.SEMANTIC,
        field="moe.switches.max_dispatch_tokens_per_rank",
        reads=sections("moe"),
        check=_capacity_fits,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep.py",
    ),
    Rule(
        name="low_latency_slabs_come_in_fours",
        kind=RuleKind.SEMANTIC,
        field="moe.switches.max_dispatch_tokens_per_rank",
        reads=sections("parallel", "moe", "batch"),
        check=_slabs_come_in_fours,
        source="DeepEP, csrc/deep_ep.cpp::low_latency_dispatch (rows of a slab % 4 == 0)",
    ),
    Rule(
        name="layout_is_the_dispatchers",
        kind=RuleKind.SEMANTIC,
        field="moe.layout",
        reads=sections("moe"),
        check=_layout_of_dispatcher,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py::pre_permute_deepep_*",
    ),
    Rule(
        name="layout_of_deepep_v2_follows_expansion",
        kind=RuleKind.SEMANTIC,
        field="moe.layout",
        reads=sections("moe", "batch"),
        check=_layout_of_v2,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py (use_expand is use_masked)",
    ),
    Rule(
        name="sm120_has_no_masked_layout",
        kind=RuleKind.SEMANTIC,
        field="moe.layout",
        reads=sections("moe", "platform"),
        check=_layout_of_platform,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py::pre_permute_standard_to_deep_gemm",
    ),
    Rule(
        name="compact_eager_comes_before_the_layout",
        kind=RuleKind.SEMANTIC,
        field="moe.layout",
        reads=sections("moe"),
        check=_layout_of_eager,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py::_should_use_masked_standard_layout",
    ),
    Rule(
        name="only_deepep_v2_expands",
        kind=RuleKind.SEMANTIC,
        field="moe.expanded",
        reads=sections("moe"),
        check=_expanded_is_v2,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py",
    ),
    Rule(
        name="one_owner_of_the_reduction",
        kind=RuleKind.SEMANTIC,
        field="moe.reduce",
        reads=sections("moe"),
        check=_reduce_is_standard,
        source="SGLang 0.5.21, models/deepseek_v2.py::forward_deepep (never all-reduces)",
    ),
    Rule(
        name="shared_expert_shards_are_summed",
        kind=RuleKind.SEMANTIC,
        field="moe.shared_experts",
        reads=sections("moe"),
        check=_shared_is_not_split,
        source="SGLang 0.5.21, models/deepseek_v2.py (a2a: shared expert at TP 1)",
    ),
    Rule(
        name="local_shared_expert_precedes_a_gather",
        kind=RuleKind.SEMANTIC,
        field="moe.shared_experts",
        reads=sections("moe", "parallel"),
        check=_local_shared_is_gathered,
        source="SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync",
    ),
)
