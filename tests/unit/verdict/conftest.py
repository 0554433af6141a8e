"""Clean runs of a small layer, judged once, and what a test needs to spoil one traced tensor."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import ResolvedScenario, resolve
from moe.formats import ScaleFormat, Stage
from moe.quant.ue8m0 import mn_major, row_major
from moe.trace import RankTrace
from reports.verdict.judge import Judge
from reports.verdict.ledger import Deviation, Ledger
from scenarios.loader import load_scenario
from topology.collectives import CollectiveCall

SMOKE = "scenarios/smoke/ep2_dp.yaml"
FOUR_RANKS = (
    "parallel.world_size=4",
    "parallel.attention.dp=4",
    "parallel.moe.ep=4",
    "batch.tokens=[5, 0, 9, 3]",
)
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "ue8m0": ("platform=sm100", *FOUR_RANKS),
    "fp32": (
        "platform=sm90",
        "model.overrides.num_experts_per_tok=2",
        "model.overrides.hidden_size=512",
    ),
    "bf16": ("moe.recipe=bf16", "model.overrides.num_experts_per_tok=3", *FOUR_RANKS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One (token, slot) as a rank computes it: where it stands, and what it is."""

    received: int
    row: int
    token: int
    slot: int
    expert: int


@dataclass(slots=True, kw_only=True)
class CleanRun:
    """One forward without a fault, and a judge that knows its layer."""

    resolved: ResolvedScenario
    hidden_states: Tensor
    traces: Sequence[RankTrace]
    calls: Sequence[Sequence[CollectiveCall]]
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.resolved.judged)
        self.judged()

    @property
    def last_rank(self) -> int:
        return len(self.traces) - 1

    @property
    def has_scales(self) -> bool:
        return self.resolved.judged.scale_format is not ScaleFormat.NONE

    def tensor(self, stage: Stage, rank: int, name: str) -> Tensor:
        return self.traces[rank][stage][name]

    def changed(
        self, stage: Stage, rank: int, tensors: Mapping[str, Tensor]
    ) -> Sequence[RankTrace]:
        """The traces with tensors of one stage on one rank replaced."""
        stages = dict(self.traces[rank].stages)
        stages[stage] = {**stages[stage], **tensors}
        traces = list(self.traces)
        traces[rank] = replace(self.traces[rank], stages=stages)
        return traces

    def judged(
        self,
        traces: Sequence[RankTrace] | None = None,
        calls: Sequence[Sequence[CollectiveCall]] | None = None,
        judge: Judge | None = None,
    ) -> Ledger:
        """The ledger of this forward, with other traces or calls where they are given."""
        chosen = judge or self.judge
        return chosen.judge(self.hidden_states, traces or self.traces, calls or self.calls).ledger

    def first(self, stage: Stage, rank: int, name: str, tensor: Tensor) -> Deviation:
        """The first deviation once one traced tensor is replaced: of that tensor, if any is.

        The tensor's reader in the same stage objects as well, since it did not read this value.
        """
        deviations = self.judged(self.changed(stage, rank, {name: tensor})).deviations
        assert deviations, f"{stage}/{rank}/{name} was replaced and nobody objects"
        assert deviations[0].stage is stage
        here = [one for one in deviations if one.stage is stage]
        return next((one for one in here if one.tensor == name), here[0])

    def route(self, rank: int, index: int = 0) -> Route:
        """The ``index``-th route that a rank computes, received row by received row."""
        restore = self.traces[rank][Stage.PRE_PERMUTE]
        received, slot = (restore["restore.output_index"] >= 0).nonzero()[index].tolist()
        local = int(restore["restore.topk_ids"][received, slot])
        return Route(
            received=received,
            row=int(restore["restore.output_index"][received, slot]),
            token=self.received_token(rank, received),
            slot=slot,
            expert=int(self.tensor(Stage.WEIGHTS, rank, "expert_ids")[local]),
        )

    def route_of_another_token(self, rank: int, route: Route) -> Route:
        """The first route on the rank that serves another token."""
        routes = (self.route(rank, index) for index in itertools.count())
        return next(other for other in routes if other.token != route.token)

    def received_token(self, rank: int, received: int) -> int:
        dispatch = self.traces[rank][Stage.DISPATCH]
        source = int(dispatch["handle.source_rank"][received])
        return sum(self.tokens[:source]) + int(dispatch["handle.source_row"][received])

    def own_token(self, rank: int, row: int) -> int:
        return sum(self.tokens[:rank]) + row

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.resolved.judged.tokens


def run_clean(*settings: str) -> CleanRun:
    loaded = load_scenario(SMOKE, overrides=("run.runtime=loopback", *settings))
    outcome = run_scenario(loaded)
    (run,) = outcome.runs
    return CleanRun(
        resolved=resolve(loaded),
        hidden_states=run.hidden_states,
        traces=[report.trace for report in run.reports],
        calls=[report.calls for report in run.reports],
    )


@pytest.fixture(scope="session", params=SETTINGS)
def clean(request: pytest.FixtureRequest) -> CleanRun:
    """A clean run of each recipe; four ranks, one of them idle, or two."""
    return run_clean(*SETTINGS[request.param])


@pytest.fixture(scope="session", params=["ue8m0", "fp32"])
def quantised(request: pytest.FixtureRequest) -> CleanRun:
    """A clean run of each recipe that has scales."""
    return run_clean(*SETTINGS[request.param])


@pytest.fixture(scope="session")
def clean_ue8m0() -> CleanRun:
    return run_clean(*SETTINGS["ue8m0"])


@pytest.fixture(scope="session")
def clean_fp32() -> CleanRun:
    return run_clean(*SETTINGS["fp32"])


@pytest.fixture(scope="session")
def last_places() -> Callable[[Tensor, int, int, int], Tensor]:
    """A copy with one cell moved by whole last places, away from zero for a positive count."""

    def move(tensor: Tensor, row: int, column: int, places: int) -> Tensor:
        moved = tensor.clone()
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        moved.view(bits)[row, column] += places
        return moved

    return move


@pytest.fixture(scope="session")
def scaled_row() -> Callable[[Tensor, int, int], Tensor]:
    """A copy of scales with one row's first scale ``exponents`` powers of two larger."""

    def change(scale: Tensor, row: int, exponents: int) -> Tensor:
        if scale.dtype == torch.float32:
            moved = scale.clone()
            moved[row, 0] *= 2.0**exponents
            return moved
        words = row_major(scale)
        words.view(torch.uint8)[row, 0] += exponents
        return mn_major(words)

    return change
