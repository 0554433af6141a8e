"""Walks the topologies of a scenario: each is run and judged, and compared with its neighbour."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actors.driver import Outcome, run_scenario
from actors.sides import sides_of
from actors.topologies import Refused, Topology, topologies_of, with_topology
from reports.comparison import Comparison, Lattice, LatticeNode, Likeness, RefusedNode
from reports.record import Mode, Verdict
from reports.result import Check, CheckVerdict, Result
from reports.verdict.determinism import TOPOLOGY
from reports.verdict.side_by_side import Side, side_by_side
from scenarios.loader import LoadedScenario


@dataclass(slots=True)
class _Walk:
    """What is known so far; sides are kept for the neighbours to come."""

    nodes: list[LatticeNode] = field(default_factory=list)
    edges: list[Comparison] = field(default_factory=list)
    refused: list[RefusedNode] = field(default_factory=list)
    sides: dict[str, Mapping[Mode, Side]] = field(default_factory=dict)


def with_lattice(loaded: LoadedScenario, outcome: Outcome) -> Outcome:
    """The outcome of a scenario with its lattice; a broken edge makes it a discrepancy.

    Args:
        loaded: the scenario, which may ask for none.
        outcome: of the scenario itself; its ranks may not have come back.
    """
    if loaded.scenario.compare is None or not outcome.runs:
        return outcome
    lattice = walk(loaded, outcome)
    return replace(outcome, result=_told(loaded, outcome.result, lattice))


def walk(loaded: LoadedScenario, outcome: Outcome) -> Lattice:
    """Every legal topology of a scenario, each beside the nearest one before it."""
    done = _Walk()
    for topology in topologies_of(loaded):
        there = with_topology(loaded, topology)
        if isinstance(there, Refused):
            done.refused.append(_refused(there))
        elif topology.name == loaded.scenario.name:
            _visit(done, topology, loaded, outcome)
        elif topology.degrees != _own_degrees(loaded):
            _visit(done, topology, there, run_scenario(there, asks=False))
    return Lattice(nodes=done.nodes, edges=done.edges, refused=done.refused)


def _own_degrees(loaded: LoadedScenario) -> tuple[int, ...]:
    own = loaded.scenario.parallel
    return Topology(name="", attention=own.attention, moe=own.moe).degrees


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
    if not outcome.runs:
        return
    here = sides_of(topology.name, outcome)
    near = next((name for name in topology.beside if name in done.sides), None)
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
    """Where the lattice breaks; or else where bits part first."""
    broken = broken_edge(lattice)
    if broken is not None:
        return f"lattice: from {broken.one} to {broken.other} it breaks: {broken.reason}"
    silent = [node for node in lattice.nodes if node.verdict is not Verdict.AGREE]
    if silent:
        return f"lattice: no edge tells right from wrong; {silent[0].name}: {silent[0].summary}"
    parted = (edge for edge in lattice.edges if edge.likeness is Likeness.ROUNDING)
    first = next(parted, None)
    modes = {edge.mode for edge in lattice.edges}
    bits = f"every {'certified ' if modes == {Mode.EXACT} else ''}bit is the same"
    if first is not None:
        bits = f"bits part first from {first.one} to {first.other} in {first.stage}, as declared"
    return f"lattice: {len(lattice.nodes)} topologies agree; {bits}"


def _told(loaded: LoadedScenario, result: Result, lattice: Lattice) -> Result:
    """The result with its lattice, its verdict and what it expected settled again."""
    sentence = lattice_sentence(lattice)
    told = {"lattice": lattice, "summary": f"{result.summary}; {sentence}"}
    wrong = [node for node in lattice.nodes if node.verdict is not Verdict.AGREE]
    broken = broken_edge(lattice)
    if result.verdict is not Verdict.AGREE or not (wrong or broken):
        return result.model_copy(update=told)
    stages = {node.stage for node in wrong} | ({broken.stage} if broken else set())
    expect = loaded.scenario.expect
    return result.model_copy(
        update={
            **told,
            "verdict": Verdict.DISCREPANCY,
            "summary": f"discrepancy: {sentence}",
            "as_expected": expect.verdict == "discrepancy" and expect.stage in stages,
            "checks": [_objecting(check, sentence) for check in result.checks],
        }
    )


def _objecting(check: Check, sentence: str) -> Check:
    """The question of topologies, answered by the lattice."""
    if check.name != TOPOLOGY:
        return check
    return check.model_copy(update={"verdict": CheckVerdict.DISCREPANCY, "detail": sentence})
