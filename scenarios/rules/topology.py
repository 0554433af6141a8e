"""Rules on how the ranks are used, which need no model size."""

from typing import Final

from moe.formats import DispatchFormat, Phase
from scenarios.parallel import sync_of
from scenarios.rules.rule import Rule, RuleKind, sections
from scenarios.schema import Scenario
from topology.sync import PaddingError, SyncError

EXPERT_PARALLEL_ONLY: Final = frozenset(
    {
        DispatchFormat.FLASHINFER,
        DispatchFormat.DEEPEP_NORMAL,
        DispatchFormat.DEEPEP_LL,
        DispatchFormat.DEEPEP_V2,
        DispatchFormat.MOONCAKE,
        DispatchFormat.NIXL,
    }
)
_WITH_CP: Final = frozenset(
    {DispatchFormat.STANDARD, DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL}
)


def _attention_degrees(scenario: Scenario) -> str | None:
    view, world = scenario.parallel.attention, scenario.parallel.world_size
    product = view.dp * view.tp * view.cp
    if product == world:
        return None
    factors = f"attention dp({view.dp}) * tp({view.tp}) * cp({view.cp})"
    return f"{factors} = {product} != world_size({world})"


def _moe_degrees(scenario: Scenario) -> str | None:
    view, world = scenario.parallel.moe, scenario.parallel.world_size
    product = view.ep * view.tp
    if product == world:
        return None
    return f"moe ep({view.ep}) * tp({view.tp}) = {product} != world_size({world})"


def _one_count_a_group(scenario: Scenario) -> str | None:
    counts, groups = len(scenario.batch.tokens), scenario.parallel.attention.dp
    if counts == groups:
        return None
    return f"{counts} counts for {groups} attention-DP groups; give one count a group"


def _whole_experts(scenario: Scenario) -> str | None:
    dispatcher, tp = scenario.moe.dispatcher, scenario.parallel.moe.tp
    if dispatcher not in EXPERT_PARALLEL_ONLY or tp == 1:
        return None
    return f"{dispatcher} moves tokens to whole experts: moe tp must be 1, is {tp}"


def _cp_dispatcher(scenario: Scenario) -> str | None:
    dispatcher, cp = scenario.moe.dispatcher, scenario.parallel.attention.cp
    if cp == 1 or dispatcher in _WITH_CP:
        return None
    return f"{dispatcher} has no context parallelism: cp must be 1, is {cp}"


def _cp_alone(scenario: Scenario) -> str | None:
    view = scenario.parallel.attention
    if view.cp == 1 or scenario.moe.dispatcher != DispatchFormat.STANDARD or view.dp * view.tp == 1:
        return None
    return (
        f"cp({view.cp}) with dispatcher standard needs dp = tp = 1, has dp({view.dp}) tp({view.tp})"
    )


def _cp_in_prefill(scenario: Scenario) -> str | None:
    cp = scenario.parallel.attention.cp
    if cp == 1 or scenario.batch.phase == Phase.EXTEND:
        return None
    return f"cp({cp}) splits prefill sequences; in decode it is inactive: use phase extend or cp 1"


def _transport_of_runtime(scenario: Scenario) -> str | None:
    runtime, transport = scenario.run.runtime, scenario.run.backends.transport
    between_processes = ("gloo", "nccl", "deep_ep")
    if runtime == "loopback" and transport in between_processes:
        return f"{transport} connects processes; runtime loopback has one: use auto or loopback"
    if runtime == "ray" and transport == "loopback":
        return "loopback connects threads of one process; runtime ray has many: use auto or gloo"
    return None


def _glue_exists(scenario: Scenario) -> str | None:
    """Ask the planner itself, once nothing simpler is wrong."""
    simpler = (_attention_degrees, _moe_degrees, _one_count_a_group, _whole_experts, _cp_alone)
    if any(check(scenario) for check in simpler):
        return None
    try:
        sync_of(scenario)
    except PaddingError:
        return None  # another rule's finding
    except SyncError as error:
        return str(error)
    return None


def _padding_exists(scenario: Scenario) -> str | None:
    if _attention_degrees(scenario) or _moe_degrees(scenario) or _one_count_a_group(scenario):
        return None
    try:
        sync_of(scenario)
    except PaddingError as error:
        return str(error)
    except SyncError:
        return None  # another rule's finding
    return None


TOPOLOGY_RULES: Final[tuple[Rule[Scenario], ...]] = (
    Rule(
        name="attention_degrees_multiply_to_world_size",
        kind=RuleKind.SEMANTIC,
        field="parallel.attention",
        reads=sections("parallel"),
        check=_attention_degrees,
        source="SGLang 0.5.21, layers/dp_attention.py",
    ),
    Rule(
        name="moe_degrees_multiply_to_world_size",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe",
        reads=sections("parallel"),
        check=_moe_degrees,
        source="SGLang 0.5.21, distributed/parallel_state.py",
    ),
    Rule(
        name="one_token_count_a_group",
        kind=RuleKind.SEMANTIC,
        field="batch.tokens",
        reads=sections("parallel", "batch"),
        check=_one_count_a_group,
        source="SGLang 0.5.21, layers/dp_attention.py",
    ),
    Rule(
        name="all_to_all_needs_whole_experts",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe.tp",
        reads=sections("parallel", "moe"),
        check=_whole_experts,
        source="SGLang 0.5.21, server_args.py (an a2a backend sets ep_size = tp_size)",
    ),
    Rule(
        name="dispatcher_has_context_parallelism",
        kind=RuleKind.SEMANTIC,
        field="parallel.attention.cp",
        reads=sections("parallel", "moe"),
        check=_cp_dispatcher,
        source="SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync",
    ),
    Rule(
        name="gathered_context_parallelism_stands_alone",
        kind=RuleKind.SEMANTIC,
        field="parallel.attention.cp",
        reads=sections("parallel", "moe"),
        check=_cp_alone,
        source="SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync",
    ),
    Rule(
        name="context_parallelism_is_for_prefill",
        kind=RuleKind.SEMANTIC,
        field="parallel.attention.cp",
        reads=sections("parallel", "batch"),
        check=_cp_in_prefill,
        source="SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync",
    ),
    Rule(
        name="a_glue_exists",
        kind=RuleKind.SEMANTIC,
        field="moe.reduce",
        reads=sections("parallel", "moe", "batch"),
        check=_glue_exists,
        source="SGLang 0.5.21, layers/dp_attention.py; models/deepseek_v4.py::_run_moe_ffn_dp_sync",
    ),
    Rule(
        name="slots_have_such_a_padding",
        kind=RuleKind.SEMANTIC,
        field="batch.padding",
        reads=sections("parallel", "moe", "batch"),
        check=_padding_exists,
        source="SGLang 0.5.21, layers/dp_attention.py::DpPaddingMode",
    ),
    Rule(
        name="transport_fits_runtime",
        kind=RuleKind.SEMANTIC,
        field="run.backends.transport",
        reads=sections("run"),
        check=_transport_of_runtime,
        source="moe-assay: loopback ranks share one process, Ray ranks have their own",
    ),
)
