"""Other topologies of a scenario: one model, one token list, other ranks.

A topology that the rules refuse, for this model, dispatcher or batch, is left out with the reason.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from actors.machine import device_of, gemm_of, kernels_of
from moe.formats import DispatchFormat
from scenarios.loader import LoadedScenario
from scenarios.rules import BrokenRule, check_rules
from scenarios.schema import AttentionParallel, MoeParallel, ParallelSpec
from topology.splits import tensor_split

_LIKE_A_TOPOLOGY: Final = re.compile(r"((dp|cp)\d+-)?(ep|tp)\d+(-tp2)?")
"""Names of ``topologies_of``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One way to use ranks: both views, each of which covers the world.

    beside  names of topologies that it is compared with, the nearest first
    """

    name: str
    attention: AttentionParallel
    moe: MoeParallel
    beside: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.moe.ep * self.moe.tp

    @property
    def degrees(self) -> tuple[int, ...]:
        """Attention dp, tp and cp, experts ep and tp."""
        view = self.attention
        return view.dp, view.tp, view.cp, self.moe.ep, self.moe.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A topology that a rule refuses for this scenario."""

    topology: Topology
    rule: BrokenRule


def topologies_of(loaded: LoadedScenario) -> Iterator[Topology]:
    """Expert parallelism from one rank up, then what branches off it; the scenario's own is last.

    The steps are the powers of two below the scenario's world size, then that size. Their ranks
    share all tokens, as attention TP leaves them; FlashInfer wants a group of tokens a rank.
    """
    world = loaded.scenario.parallel.world_size
    grouped = loaded.scenario.moe.dispatcher is DispatchFormat.FLASHINFER
    steps = [*_powers_of_two(below=world), world]
    for at, ep in enumerate(steps):
        before = tuple(f"ep{size}" for size in reversed(steps[:at]))
        dp, tp = (ep, 1) if grouped else (1, ep)
        yield _topology(f"ep{ep}", ep, dp=dp, tp=tp, beside=before)
    ep_first = tuple(f"ep{size}" for size in reversed(steps))
    if world > 1:
        yield _topology(f"tp{world}", 1, tp=world, moe_tp=world, beside=("ep1",))
    if world > 2 and world % 2 == 0:
        half = world // 2
        beside = (f"ep{half}", *ep_first)
        yield _topology(f"ep{half}-tp2", half, tp=world, moe_tp=2, beside=beside)
        yield _topology(f"dp2-ep{world}", world, dp=2, tp=half, beside=ep_first)
    if world > 1:
        yield _topology(f"dp{world}-ep{world}", world, dp=world, beside=ep_first)
        yield _topology(f"cp{world}-ep{world}", world, cp=world, beside=ep_first)
    yield _own(loaded, beside=ep_first)


def with_topology(loaded: LoadedScenario, topology: Topology) -> LoadedScenario | Refused:
    """The scenario on other ranks, those of this process; its token list is dealt out anew.

    Faults of ranks that are not there are left out.
    """
    scenario = loaded.scenario
    tokens, moe = scenario.batch.tokens, scenario.moe
    if topology.attention != scenario.parallel.attention:
        tokens = _dealt(sum(tokens), topology.attention.dp)
        moe = moe.model_copy(update={"reduce": "auto"})
    padding = "auto" if topology.attention.dp == 1 else scenario.batch.padding
    run = {"runtime": "loopback", "rounds": 1, **_same_hardware(loaded)}
    sections = {
        "parallel": ParallelSpec(
            world_size=topology.world_size, attention=topology.attention, moe=topology.moe
        ),
        "moe": moe,
        "batch": scenario.batch.model_copy(update={"tokens": tokens, "padding": padding}),
        "run": scenario.run.model_copy(update=run),
        "compare": None,
    }
    there = scenario.model_copy(update=sections)
    report = check_rules(there, loaded.model)
    if report.problems:
        return Refused(topology=topology, rule=report.problems[0])
    faults = tuple(
        fault
        for fault in loaded.faults
        if not isinstance(rank := fault.params.get("rank"), int) or rank < topology.world_size
    )
    return replace(loaded, scenario=there, faults=faults, notes=report.notes)


def _same_hardware(loaded: LoadedScenario) -> dict[str, object]:
    """Keys of ``run`` with which another topology computes as the scenario does."""
    scenario = loaded.scenario
    named, device = scenario.run.backends, device_of(scenario).name
    if device == "cpu":
        return {"backends": named.model_copy(update={"transport": "auto"})}
    backends = {"transport": "auto", "gemm": gemm_of(loaded).name}
    backends["kernels"] = kernels_of(loaded).name
    return {"device": device, "backends": named.model_copy(update=backends)}


def _own(loaded: LoadedScenario, beside: tuple[str, ...]) -> Topology:
    """The scenario's, under its name; one that reads like a topology is told from that."""
    name, own = loaded.scenario.name, loaded.scenario.parallel
    if _LIKE_A_TOPOLOGY.fullmatch(name):
        name = f"{name} (the scenario)"
    return Topology(name=name, attention=own.attention, moe=own.moe, beside=beside)


def _topology(
    name: str,
    ep: int,
    *,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    moe_tp: int = 1,
    beside: Sequence[str] = (),
) -> Topology:
    return Topology(
        name=name,
        attention=AttentionParallel(dp=dp, tp=tp, cp=cp),
        moe=MoeParallel(ep=ep, tp=moe_tp),
        beside=tuple(beside),
    )


def _powers_of_two(*, below: int) -> list[int]:
    return [1 << power for power in range(below.bit_length()) if 1 << power < below]


def _dealt(num_tokens: int, groups: int) -> tuple[int, ...]:
    """Tokens of each group, as even as they come."""
    return tuple(map(len, tensor_split(tuple(range(num_tokens)), groups)))
