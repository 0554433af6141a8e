"""What the stages of small layers hand on, for faults to be let loose on."""

from functools import cache

from actors.build import build_layer, load_layer, rank_weights
from actors.dispatchers import dispatch_buffers
from actors.resolve import resolve
from moe.batch import Batch
from moe.faults import FaultTap, arm
from moe.formats import Stage
from moe.grouped_gemm import TorchGemm
from scenarios.inputs import deal, random_hidden_states
from scenarios.loader import load_scenario
from topology.loopback import LoopbackWorld

RANK = 1
"""Of two: whose values they are, and where faults are armed."""

NUM_SLOTS = 8
HIDDEN = 256
SMALL = (
    "run.runtime=loopback",
    f"model.overrides={{hidden_size: {HIDDEN}, moe_intermediate_size: 256, "
    f"n_routed_experts: {NUM_SLOTS}}}",
    "moe.shared_experts=replicated",
)
LAYERS = {
    "standard masked": ("moe.dispatcher=standard", "moe.layout=masked"),
    "standard compact": ("moe.dispatcher=standard", "moe.layout=compact"),
    "flashinfer extend": ("moe.dispatcher=flashinfer",),
    "flashinfer decode": ("moe.dispatcher=flashinfer", "batch.phase=decode"),
    "deepep_normal": ("moe.dispatcher=deepep_normal",),
    "deepep_ll": ("moe.dispatcher=deepep_ll", "batch.phase=decode"),
    "deepep_v2": ("moe.dispatcher=deepep_v2",),
    "deepep_v2 mxfp8": ("moe.dispatcher=deepep_v2", "moe.recipe=mxfp8"),
    "deepep_v2 expanded": ("moe.dispatcher=deepep_v2", "batch.phase=decode"),
}


@cache
def handed_on(layer, tokens):
    """Stage -> its value in a forward of this many tokens of each rank."""
    settings = (*SMALL, *LAYERS[layer], f"batch.tokens={list(tokens)}")
    plan = resolve(load_scenario("scenarios/smoke/ep2_dp.yaml", overrides=settings)).plan
    rows = random_hidden_states(7, sum(tokens), HIDDEN)
    given = deal(Batch(hidden_states=rows), plan.sync)
    world = LoopbackWorld(len(tokens))
    return world.run(lambda verbs: _values(plan, verbs, given[verbs.rank]))[RANK]


def _values(plan, verbs, given):
    seen = {}

    def tap(stage, value):
        seen[stage] = value
        return value

    gemm = TorchGemm()
    loaded = load_layer(gemm, tap(Stage.WEIGHTS, rank_weights(plan, verbs.rank)))
    build_layer(plan, verbs, gemm, loaded, dispatch_buffers(plan)).forward(given, tap)
    return seen


def let_loose(fault, layer, tokens, **params):
    """(stage -> value behind one armed fault, whether it has acted)."""
    armed = arm(fault, {"rank": RANK, **params}, tokens)
    tap = FaultTap(RANK, len(tokens), [armed], NUM_SLOTS)
    values = {stage: tap(stage, value) for stage, value in handed_on(layer, tokens).items()}
    return values, bool(tap.acted)
