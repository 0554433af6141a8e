"""The same tokens on the simplest other topology: which bits do they share, and may they part?"""

from actors.dispatchers import placement
from actors.joined_weights import joined_weights
from actors.planning import judged_layer, plan_of
from actors.rank_program import RankProgram
from actors.result_rows import Answer
from actors.topologies import Refused, topologies_of, with_topology
from moe.grouped_gemm import CACHED_MATRIX_BYTES
from reports.result import CheckVerdict, Mode
from reports.verdict.determinism import TOPOLOGY
from reports.verdict.judge import Judge
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.subject import Subject
from reports.verdict.topology_bits import (
    CanonicalForward,
    DeclaredParting,
    Parting,
    canonical_forward,
    declared_parting,
    first_parting,
    is_declared,
)
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario
from topology.loopback import LoopbackWorld


def ask_of_topology(loaded: LoadedScenario, mode: Mode, subject: Subject, ledger: Ledger) -> Answer:
    """Compare a forward with one of its tokens on as few ranks as the rules allow.

    That one runs in this process, without injected faults. Bits may differ from a rounding point
    on that one of both topologies has alone; what differs earlier is entered in the ledger.

    Args:
        loaded: the scenario.
        mode: of the forward.
        subject: the forward.
        ledger: of that forward.
    """
    other = _simplest_other(loaded)
    if isinstance(other, str):
        return Answer(verdict=CheckVerdict.NOT_APPLICABLE, detail=other)
    ledger.ask(TOPOLOGY)
    name, there = other
    one, reference = canonical_forward(subject), _forward(there, mode, subject)
    parting = first_parting(one, reference)
    declared = declared_parting(one.layer, reference.layer)
    if parting and not is_declared(parting, declared):
        ledger.report(_deviation(name, parting, subject))
    return Answer(verdict=CheckVerdict.AGREE, detail=f"{name}: {_sentence(parting, declared)}")


def _simplest_other(loaded: LoadedScenario) -> tuple[str, LoadedScenario] | str:
    """The first topology that is another one and that the rules allow; or why there is none."""
    own = loaded.scenario.parallel
    reason = "the scenario's topology is the only one"
    for topology in topologies_of(loaded):
        if (topology.attention, topology.moe) == (own.attention, own.moe):
            continue
        there = with_topology(loaded, topology)
        if isinstance(there, Refused):
            reason = f"{topology.name}: {there.rule.field}: {there.rule.message}"
        elif (size := _weight_bytes(loaded)) > CACHED_MATRIX_BYTES:
            return f"{topology.name} would hold {size >> 20} MiB of weights in this process"
        else:
            return topology.name, there
    return reason


def _weight_bytes(loaded: LoadedScenario) -> int:
    """fp32 bytes of the larger matrix of all experts, which the reference GEMM keeps."""
    model = loaded.model
    return 4 * model.n_routed_experts * 2 * model.moe_intermediate_size * model.hidden_size


def _forward(there: LoadedScenario, mode: Mode, subject: Subject) -> CanonicalForward:
    """The subject's tokens on another topology, with the ranks' own weights where one rank has all.

    Whether these are right has been asked before.
    """
    plan = plan_of(there, mode)
    given = deal(subject.batch, plan.sync, plan.seed)
    experts = placement(plan).local_experts(0)
    joined = joined_weights(subject, experts) if plan.layout.world_size == 1 else None
    if joined is None:
        programs = [RankProgram(rank, plan) for rank in plan.layout.world]
    else:
        programs = [RankProgram(0, plan, prepare=lambda plan, rank: joined)]
    reports = LoopbackWorld(plan.layout.world_size).run(
        lambda verbs: programs[verbs.rank].forward(given[verbs.rank], verbs)
    )
    judge = Judge(judged_layer(plan, there))
    return canonical_forward(judge.subject(subject.batch, [report.trace for report in reports]))


def _deviation(name: str, parting: Parting, subject: Subject) -> Deviation:
    rows = subject.layer_rows if parting.slot is None else subject.route_rows
    is_row = rows.token == parting.token
    if parting.slot is not None:
        is_row &= rows.slot == parting.slot
    return Deviation(
        check=TOPOLOGY,
        stage=parting.stage,
        rank=int(rows.rank[is_row][0]),
        tensor=parting.tensor,
        token=parting.token,
        slot=parting.slot,
        columns=(parting.column, parting.column + 1),
        got=parting.one,
        want=parting.other,
        band=0.0,
        detail=f"{parting.cells} of {parting.of} cells differ from {name}; no rounding point that "
        "only one of them declares lies in front",
    )


def _sentence(parting: Parting | None, declared: DeclaredParting | None) -> str:
    """Where bits part, and why they may."""
    if parting is None and declared is None:
        return "the same bits in every stage"
    if parting is None:
        assert declared is not None
        return f"the same bits, though from {declared.stage} on they may differ: {declared.reason}"
    said = f"bits part in {parting.stage}, in {parting.cells} of {parting.of} cells"
    return f"{said}; {declared.stage}: {declared.reason}" if declared else said
