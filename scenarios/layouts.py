"""Which grouped layout a scenario's rows come in, and the numbers of rows that decide it."""

from moe.formats import DispatchFormat, GemmLayout, Phase, QuantRecipe
from moe.layout_choice import LayoutChoice, LayoutFacts, choose_layout
from moe.platforms import PLATFORMS
from moe.recipes import RECIPES, WeightFormat
from scenarios.models import MoeModel
from scenarios.parallel import sync_of
from scenarios.schema import Scenario
from topology.splits import align


def layout_choice(scenario: Scenario, model: MoeModel) -> LayoutChoice:
    """What the dispatcher hands over; standard and flashinfer choose by rule.

    Raises:
        ValueError: the topology, which tells how many rows there are, is no topology.
    """
    if scenario.moe.dispatcher.folds_scaling_factor:
        return choose_layout(_facts(scenario, model))
    return _of_dispatcher(scenario)


def _facts(scenario: Scenario, model: MoeModel) -> LayoutFacts:
    moe, view = scenario.moe, scenario.parallel.moe
    hidden_size, intermediate_size = padded_sizes(model, moe.recipe)
    return LayoutFacts(
        num_rows=rows_into_the_runner(scenario),
        num_local_experts=(model.n_routed_experts + moe.redundant_experts) // view.ep,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size // view.tp,
        recipe=moe.recipe,
        swiglu_limit=model.swiglu_limit,
        platform=PLATFORMS[scenario.platform],
        asked=moe.layout,
        compact_eager=moe.switches.compact_eager,
        memory_fraction=moe.switches.masked_memory_budget_fraction,
    )


def _of_dispatcher(scenario: Scenario) -> LayoutChoice:
    """DeepEP's kind hands rows over in the layout they are multiplied in.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::pre_permute_deepep_*.
    """
    dispatcher, asked = scenario.moe.dispatcher, scenario.moe.layout
    if dispatcher.is_low_latency:
        return _chosen(GemmLayout.MASKED, f"{dispatcher} hands over one slab an expert")
    if dispatcher is not DispatchFormat.DEEPEP_V2:
        return _chosen(GemmLayout.CONTIG, f"{dispatcher} hands over expert segments end to end")
    if not is_expanded(scenario):
        return _chosen(GemmLayout.CONTIG, f"{dispatcher} hands over tokens, not expanded to routes")
    if asked == "compact":
        return _chosen(GemmLayout.CONTIG, f"asked for, of what {dispatcher} expanded")
    return _chosen(GemmLayout.MASKED, f"{dispatcher} expanded has room for a slab an expert")


def _chosen(layout: GemmLayout, why: str) -> LayoutChoice:
    return LayoutChoice(layout=layout, reason=f"{layout}: {why}")


def is_expanded(scenario: Scenario) -> bool:
    """Whether deepep_v2 hands over one row a route: by default in decode.

    Source: SGLang 0.5.21, token_dispatcher/deepep_v2.py.
    """
    if scenario.moe.dispatcher is not DispatchFormat.DEEPEP_V2:
        return False
    if scenario.moe.expanded == "auto":
        return scenario.batch.phase is Phase.DECODE
    return scenario.moe.expanded


def rows_into_the_runner(scenario: Scenario) -> int:
    """Rows that a rank's runner is handed, where these are tokens: T of the layout's rule.

    FlashInfer's decode has a slot of equal height for each rank, however few rows it holds.

    Raises:
        ValueError: the topology is no topology.
    """
    layer = sync_of(scenario).layer
    if scenario.moe.dispatcher is not DispatchFormat.FLASHINFER:
        return len(layer[0])
    lengths = [len(rows) for rows in layer]
    in_slots = scenario.batch.phase is Phase.DECODE
    return max(lengths) * len(lengths) if in_slots else sum(lengths)


def has_bf16_wire(scenario: Scenario) -> bool:
    """Whether dispatch hands over bf16 whatever the recipe, and pre-permute quantises.

    Always without an all-to-all of codes; DeepEP's first two modes do when they are asked to.

    Source: SGLang 0.5.21, token_dispatcher/deepep.py (SGLANG_DEEPEP_BF16_DISPATCH).
    """
    moe = scenario.moe
    if moe.dispatcher.folds_scaling_factor:
        return True
    can_choose = moe.dispatcher is DispatchFormat.DEEPEP_NORMAL or moe.dispatcher.is_low_latency
    return can_choose and moe.switches.deepep_bf16_dispatch


def padded_sizes(model: MoeModel, recipe: QuantRecipe) -> tuple[int, int]:
    """(hidden size, intermediate size) that the experts work with: zeros fill what is missing.

    To multiples that the method allocates for FlashInfer's kernels; DeepGEMM reads the same.

    Source: SGLang 0.5.21, quantization/mxfp4.py::Mxfp4MoEMethod.create_weights.
    """
    hidden, width, unit = model.hidden_size, model.moe_intermediate_size, model.pads_to
    if unit is None or RECIPES[recipe].checkpoint is not WeightFormat.MXFP4:
        return hidden, width
    return align(hidden, unit), align(width, unit)
