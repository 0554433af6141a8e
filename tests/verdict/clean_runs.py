"""Clean runs of small layers, and where a token stands in the tensors that they leave."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import ResolvedScenario, resolve
from moe.batch import Batch
from moe.formats import ScaleFormat, Stage
from moe.trace import RankTrace
from reports.verdict.deviation import Deviation
from reports.verdict.format_views import view_of
from reports.verdict.formats.view import FormatView
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
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
    batch: Batch
    traces: Sequence[RankTrace]
    calls: Sequence[Sequence[CollectiveCall]]
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.resolved.judged)
        self.judged()

    @property
    def view(self) -> FormatView:
        return view_of(self.resolved.judged)

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
        return chosen.check(self.batch, traces or self.traces, calls or self.calls)

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
        if "handle.source_rank" not in dispatch:
            return self.layer_token(rank, received)
        source = int(dispatch["handle.source_rank"][received])
        return self.layer_token(source, int(dispatch["handle.source_row"][received]))

    def own_token(self, rank: int, row: int) -> int:
        return self.resolved.judged.sync.entry[rank][row]

    def layer_token(self, rank: int, row: int) -> int:
        return self.resolved.judged.sync.layer[rank][row]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(len(rows) for rows in self.resolved.judged.sync.entry)


@lru_cache(maxsize=8)
def run_clean(*settings: str) -> CleanRun:
    """A clean run, nothing of which is written to: files with equal settings share the latest."""
    loaded = load_scenario(SMOKE, overrides=("run.runtime=loopback", *settings))
    outcome = run_scenario(loaded, asks=False)
    (run,) = outcome.runs
    return CleanRun(
        resolved=resolve(loaded),
        batch=run.batch,
        traces=[report.trace for report in run.reports],
        calls=[report.calls for report in run.reports],
    )
