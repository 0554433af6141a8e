"""Walks the topologies of a scenario: each is run and judged, and compared with its neighbour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.by_mode import Keep
from actors.driver import Outcome, run_scenario
from actors.expected import is_expected
from actors.sides import sides_of
from actors.topologies import Refused, Topology, topologies_of, with_topology
from reports.comparison import Comparison, Lattice, LatticeNode, Likeness, RefusedNode
from reports.record import Mode, Verdict
from reports.result import Check, CheckVerdict, Finding, Result
from reports.verdict.determinism import TOPOLOGY
from reports.verdict.side_by_side import Side, side_by_side
from scenarios.loader import LoadedScenario


@dataclass(slots=True)
class _Walk:
    """What is known so far; sides are kept for the neighbours to come.

    firsts  the first finding of each topology that has any
    """

    nodes: list[LatticeNode] = field(default_factory=list)
    edges: list[Comparison] = field(default_factory=list)
    refused: list[RefusedNode] = field(default_factory=list)
    sides: dict[str, Mapping[Mode, Side]] = field(default_factory=dict)
    firsts: dict[str, Finding] = field(default_factory=dict)

    @property
    def lattice(self) -> Lattice:
        """What a result holds of it."""
        return Lattice(nodes=self.nodes, edges=self.edges, refused=self.refused)

    def nearest(self, topology: Topology) -> str | None:
        """The nearest topology whose sides are there."""
        return next((name for name in topology.beside if name in self.sides), None)

    def forget(self, to_come: Sequence[Topology]) -> None:
        """Drop sides that none of the topologies to come is compared with."""
        needed = {self.nearest(topology) for topology in to_come}
        self.sides = {name: side for name, side in self.sides.items() if name in needed}


def with_lattice(loaded: LoadedScenario, outcome: Outcome) -> Outcome:
    """The outcome of a scenario with its lattice, which may make its verdict a worse one.

    Args:
        loaded: the scenario, which may ask for none.
        outcome: of the scenario itself; its ranks may not have come back.
    """
    if loaded.scenario.compare is None or not outcome.runs:
        return outcome
    return replace(outcome, result=_told(loaded, outcome.result, _walk(loaded, outcome)))


def _walk(loaded: LoadedScenario, outcome: Outcome) -> _Walk:
    """Every legal topology of a scenario, each beside the nearest one before it."""
    done, topologies = _Walk(), tuple(topologies_of(loaded))
    own = topologies[-1]
    for at, topology in enumerate(topologies):
        there = with_topology(loaded, topology)
        if isinstance(there, Refused):
            done.refused.append(_refused(there))
        elif topology is own:
            _visit(done, topology, loaded, outcome)
        elif topology.degrees != own.degrees:
            keep = Keep(traces=False, sides=True)
            _visit(done, topology, there, run_scenario(there, asks=False, keep=keep))
        done.forget(topologies[at + 1 :])
    return done


def _refused(refused: Refused) -> RefusedNode:
    rule = refused.rule
    return RefusedNode(
        name=refused.topology.name, field=rule.field, message=rule.message, source=rule.source
    )


def _visit(done: _Walk, topology: Topology, there: LoadedScenario, outcome: Outcome) -> None:
    """Enter a topology, and its edges to the nearest one that has been visited: one a mode."""
    result = outcome.result
    done.nodes.append(
        LatticeNode(
            name=topology.name,
            world_size=topology.world_size,
            attention=topology.attention.model_dump(include={"dp", "tp", "cp"}),
            moe=topology.moe.model_dump(),
            tokens=there.scenario.batch.tokens,
            verdict=result.verdict,
            stage=result.first_divergence.stage if result.first_divergence else None,
            summary=result.summary,
        )
    )
    if result.findings:
        done.firsts[topology.name] = result.findings[0]
    if not outcome.runs:
        return
    here, near = sides_of(topology.name, outcome), done.nearest(topology)
    if near is not None:
        done.edges += [side_by_side(done.sides[near][mode], side) for mode, side in here.items()]
    done.sides[topology.name] = here


def broken_edge(lattice: Lattice) -> Comparison | None:
    """The first edge that has a right side and a wrong one, or two right ones that cannot be."""
    verdict = {node.name: node.verdict for node in lattice.nodes}
    for edge in lattice.edges:
        right = [verdict[name] is Verdict.AGREE for name in (edge.one, edge.other)]
        if edge.likeness is Likeness.BREAKS and any(right):
            return edge
    return None


def lattice_sentence(lattice: Lattice) -> str:
    """Where the lattice breaks; or else where bits part first. What could not run is named."""
    skipped = [node for node in lattice.nodes if node.verdict is Verdict.UNSUPPORTED]
    left_out = "".join(f"; not run: {node.name}: {node.summary}" for node in skipped)
    broken = broken_edge(lattice)
    if broken is not None:
        said = f"lattice: from {broken.one} to {broken.other} it breaks: {broken.reason}"
        return said + left_out
    wrong = _wrong(lattice)
    if wrong:
        said = f"lattice: no edge tells right from wrong; {wrong[0].name}: {wrong[0].summary}"
        return said + left_out
    parted = (edge for edge in lattice.edges if edge.likeness is Likeness.ROUNDING)
    first = next(parted, None)
    modes = {edge.mode for edge in lattice.edges}
    bits = f"every {'certified ' if modes == {Mode.EXACT} else ''}bit is the same"
    if first is not None:
        bits = f"bits part first from {first.one} to {first.other} in {first.stage}, as declared"
    agreeing = len(lattice.nodes) - len(skipped)
    return f"lattice: {agreeing} topologies agree; {bits}{left_out}"


def _wrong(lattice: Lattice) -> list[LatticeNode]:
    """Topologies that are wrong, or that could not be judged."""
    return [node for node in lattice.nodes if node.verdict in (Verdict.DISCREPANCY, Verdict.FAILED)]


def _told(loaded: LoadedScenario, result: Result, done: _Walk) -> Result:
    """The result with its lattice, its verdict and what it expected settled again."""
    sentence, settled = lattice_sentence(done.lattice), _settled(loaded, done)
    told = {"lattice": done.lattice, "summary": f"{result.summary}; {sentence}"}
    if result.verdict is not Verdict.AGREE or settled is None:
        return result.model_copy(update=told)
    verdict, as_expected = settled
    checks = [_objecting(check, CheckVerdict(verdict), sentence) for check in result.checks]
    return result.model_copy(
        update={
            **told,
            "verdict": verdict,
            "summary": f"{verdict}: {sentence}",
            "as_expected": as_expected,
            "checks": checks,
        }
    )


def _settled(loaded: LoadedScenario, done: _Walk) -> tuple[Verdict, bool] | None:
    """The worst verdict of a walk, and whether it was expected; None: all that ran agrees."""
    wrong, parted = _wrong(done.lattice), _unexplained(done.lattice)
    worst = [node for node in wrong if node.verdict is Verdict.DISCREPANCY]
    if not (wrong or parted):
        return None
    verdict = Verdict.DISCREPANCY if worst or parted else Verdict.FAILED
    firsts = [done.firsts.get(node.name) for node in worst or wrong]
    if parted and not worst:
        return verdict, any(_expects_parting(loaded, edge) for edge in parted)
    return verdict, any(is_expected(loaded, verdict, first) for first in firsts)


def _unexplained(lattice: Lattice) -> list[Comparison]:
    """Edges between right topologies whose bits part where nothing lets them."""
    right = {node.name for node in lattice.nodes if node.verdict is Verdict.AGREE}
    return [
        edge
        for edge in lattice.edges
        if edge.likeness is Likeness.BREAKS and {edge.one, edge.other} <= right
    ]


def _expects_parting(loaded: LoadedScenario, edge: Comparison) -> bool:
    """Whether a scenario expects bits to part there; no diagnosis names a mistake for that."""
    expect = loaded.scenario.expect
    is_there = expect.stage == edge.stage and expect.mode in (None, edge.mode)
    return expect.verdict == "discrepancy" and is_there and expect.fault is None


def _objecting(check: Check, verdict: CheckVerdict, sentence: str) -> Check:
    """The question of topologies, answered by the lattice."""
    if check.name != TOPOLOGY:
        return check
    return check.model_copy(update={"verdict": verdict, "detail": sentence})
