"""The same tokens on the simplest other topology: which bits do they share, and may they part?"""

from functools import cached_property

from actors.dispatchers import placement
from actors.joined_weights import joined_weights
from actors.plan import LayerPlan
from actors.planning import judged_layer, plan_of
from actors.rank_program import RankProgram
from actors.result_rows import Answer
from actors.topologies import Refused, topologies_of, with_topology
from moe import grouped_gemm
from moe.formats import Stage
from moe.trace import StageTensors
from reports.result import CheckVerdict, Mode
from reports.verdict.canonical import CanonicalForward, canonical_forward
from reports.verdict.determinism import TOPOLOGY
from reports.verdict.deviation import Deviation
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Subject
from reports.verdict.topology_bits import (
    DeclaredParting,
    Parting,
    declared_parting,
    first_parting,
    is_declared,
)
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario
from topology.loopback import LoopbackWorld


class SimplestOther:
    """The simplest other topology of a scenario; its ranks keep their weights between forwards.

    They run in this process, without injected faults.

    Args:
        loaded: the scenario.
    """

    def __init__(self, loaded: LoadedScenario) -> None:
        self._loaded = loaded
        self._ranks: _Ranks | None = None

    @cached_property
    def found(self) -> tuple[str, LoadedScenario] | str:
        """Its name and the scenario on it; or why there is none."""
        return _simplest_other(self._loaded)

    def forward(self, there: LoadedScenario, mode: Mode, subject: Subject) -> CanonicalForward:
        """The subject's tokens there, with the ranks' own weights where one rank has all.

        Whether these are right has been asked before.

        Args:
            there: the scenario of ``found``.
            mode: of the subject.
            subject: the forward whose tokens and weights are taken.
        """
        plan = plan_of(there, mode)
        given = deal(subject.batch, plan.sync, plan.seed)
        if self._ranks is None or not self._ranks.serves(plan, subject):
            self._ranks = _Ranks(plan, subject)
        programs = self._ranks.programs
        reports = LoopbackWorld(plan.layout.world_size).run(
            lambda verbs: programs[verbs.rank].forward(given[verbs.rank], verbs)
        )
        judge = Judge(judged_layer(plan, there))
        return canonical_forward(judge.subject(subject.batch, [one.trace for one in reports]))


class _Ranks:
    """Programs of a plan, for subjects whose ranks hold the weights that they were made for.

    Args:
        plan: of the other topology.
        subject: whose weights one rank takes over, if it has all.
    """

    def __init__(self, plan: LayerPlan, subject: Subject) -> None:
        self._fingerprint, self._held = plan.fingerprint(), _held(subject)
        slots = placement(plan).local_experts(0)
        joined = joined_weights(subject, slots) if plan.layout.world_size == 1 else None
        if joined is None:
            self.programs = [RankProgram(rank, plan) for rank in plan.layout.world]
        else:
            self.programs = [RankProgram(0, plan, prepare=lambda plan, rank: joined)]

    def serves(self, plan: LayerPlan, subject: Subject) -> bool:
        """Whether plan and weights are those that the programs were made for."""
        pairs = zip(self._held, _held(subject), strict=True)
        return self._fingerprint == plan.fingerprint() and all(one is two for one, two in pairs)


def _held(subject: Subject) -> list[StageTensors]:
    """What each rank has of prepared weights; a living rank shows the same ones each time."""
    return [subject.stage(Stage.WEIGHTS, rank) for rank in subject.ranks]


def ask_of_topology(
    reference: SimplestOther, mode: Mode, subject: Subject, ledger: Ledger
) -> Answer:
    """Compare a forward with one of its tokens on as few ranks as the rules allow.

    Bits may differ from a rounding point on that one of both topologies has alone; what differs
    earlier is entered in the ledger.

    Args:
        reference: of the scenario.
        mode: of the forward.
        subject: the forward.
        ledger: of that forward.
    """
    if isinstance(reference.found, str):
        return Answer(verdict=CheckVerdict.NOT_APPLICABLE, detail=reference.found)
    ledger.ask(TOPOLOGY)
    name, there = reference.found
    one, other = canonical_forward(subject), reference.forward(there, mode, subject)
    parting = first_parting(one, other)
    declared = declared_parting(one.layer, other.layer)
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
        elif (size := _weight_bytes(loaded)) > grouped_gemm.CACHED_MATRIX_BYTES:
            return f"{topology.name} would hold {size >> 20} MiB of weights in this process"
        else:
            return topology.name, there
    return reason


def _weight_bytes(loaded: LoadedScenario) -> int:
    """fp32 bytes of the larger matrix of all experts, which the reference GEMM keeps."""
    model = loaded.model
    return 4 * model.n_routed_experts * 2 * model.moe_intermediate_size * model.hidden_size


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
