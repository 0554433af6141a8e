"""What runs of one scenario under different faults have in common, kept from one to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actors.build import rank_weights
from actors.living import LivingScenario
from actors.plan import LayerPlan
from actors.rank_program import RankReport
from actors.result_rows import ModeRun
from actors.world import LoopbackRanks
from moe.batch import LayerInput
from moe.faults import ArmedFault
from moe.faults.bits import same_layouts
from moe.formats import Stage
from moe.trace import StageTensors
from moe.weights import LayerWeights
from reports.verdict.judge import Judge
from reports.verdict.twins import NUM_TWINS

Forwards = Sequence[Sequence[RankReport]]
"""What all ranks brought home from each forward, in order."""


class WatchedRanks(LoopbackRanks):
    """Ranks of this process of whose forwards every one is kept, judged or not.

    seen  what they brought home
    """

    seen: list[list[RankReport]]

    def forward(self, given: Sequence[LayerInput], timeout_s: float) -> list[RankReport]:
        """See ``World``."""
        reports = super().forward(given, timeout_s)
        self.seen.append(reports)
        return reports


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Clean:
    """The first run without faults, before it was asked about determinism."""

    judges: Mapping[str, Judge]
    runs: tuple[ModeRun, ...]

    def anew(self, reports: Forwards) -> tuple[ModeRun, ...]:
        """The same judgements, with ledgers of their own, of forwards that are the same."""
        return tuple(
            replace(
                run,
                reports=ranks,
                judgement=replace(run.judgement, ledger=run.judgement.ledger.copy()),
            )
            for run, ranks in zip(self.runs, reports, strict=True)
        )


class KeptWork:
    """Prepared weights of ranks, judges that have decoded theirs, and what they said; of one layer.

    The first run without faults leaves its judges and judgements.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int], LayerWeights] = {}
        self._clean: _Clean | None = None

    def open_ranks(self, plan: LayerPlan, faults: Sequence[ArmedFault]) -> WatchedRanks:
        """Ranks that hold tensors which were prepared once."""
        ranks = WatchedRanks(plan, faults, self._rank_weights)
        ranks.seen = []
        return ranks

    def _rank_weights(self, plan: LayerPlan, rank: int) -> LayerWeights:
        """What a rank holds under a plan; prepared once, and the same tensors ever after."""
        key = plan.fingerprint(), rank
        if key not in self._prepared:
            self._prepared[key] = rank_weights(plan, rank)
        return self._prepared[key]

    def judged(
        self, living: LivingScenario, reports: Forwards, num_twins: int = NUM_TWINS
    ) -> tuple[tuple[ModeRun, ...], Mapping[str, Judge]]:
        """What the checks say of a run's forwards, and the judges that go on with it.

        Judges of the clean run serve where every rank has its weights. Where the forwards are
        those of the clean run bit for bit, so is what is said of them; forwards to come may differ.

        Args:
            living: the run; a faulty judge is not another's.
            reports: of its forwards.
            num_twins: see ``LivingScenario.judged``.

        Raises:
            UnreadableTraceError: see ``LivingScenario.judged``.
        """
        faults, clean = living.resolved.faults, self._clean
        if clean is None or any(armed.fault.kind.is_of_the_judge for armed in faults):
            runs = living.judged(reports, living.judges, num_twins)
            if not faults:
                clean = self._clean = _Clean(judges=living.judges, runs=runs)
                runs = clean.anew(reports)
            return runs, living.judges
        modes = [str(one.mode) for one in living.inputs]
        firsts = {mode: at for at, mode in reversed(list(enumerate(modes)))}
        before = [run.reports for run in clean.runs]
        same = {mode for mode, at in firsts.items() if _same_weights(before[at], reports[at])}
        judges = {mode: (clean.judges if mode in same else living.judges)[mode] for mode in firsts}
        if forwards_differ(before, reports):
            return living.judged(reports, judges, num_twins), judges
        return clean.anew(reports), judges


def forwards_differ(clean: Forwards, other: Forwards) -> bool:
    """Whether two runs differ in a collective, or in any bit or stride of any traced tensor.

    It asks no check, so that a check that sees nothing cannot hide that there was something.
    """
    return len(clean) != len(other) or any(
        _reports_differ(one, two)
        for ranks, again in zip(clean, other, strict=True)
        for one, two in zip(ranks, again, strict=True)
    )


def _reports_differ(one: RankReport, other: RankReport) -> bool:
    stages = one.trace.stages.keys()
    return (
        one.calls != other.calls
        or stages != other.trace.stages.keys()
        or not all(_same_tensors(one.trace[stage], other.trace[stage]) for stage in stages)
    )


def _same_weights(one: Sequence[RankReport], other: Sequence[RankReport]) -> bool:
    return all(
        _same_tensors(a.trace[Stage.WEIGHTS], b.trace[Stage.WEIGHTS])
        for a, b in zip(one, other, strict=True)
    )


def _same_tensors(one: StageTensors, other: StageTensors) -> bool:
    return one.keys() == other.keys() and all(same_layouts(one[name], other[name]) for name in one)
