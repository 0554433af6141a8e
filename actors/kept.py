"""What runs of one scenario under different faults have in common, kept from one to the next."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from actors.build import rank_weights
from actors.plan import LayerPlan
from actors.rank_program import RankReport
from moe.faults import ArmedFault
from moe.faults.bits import same_bits
from moe.formats import Stage
from moe.trace import StageTensors
from moe.weights import LayerWeights
from reports.verdict.judge import Judge

if TYPE_CHECKING:  # the driver takes a KeptWork
    from actors.driver import Outcome

Reports = Mapping[str, Sequence[RankReport]]
"""Mode -> what the ranks brought home from one of its forwards."""


class KeptWork:
    """Prepared weights of ranks and judges that have decoded theirs, of one scenario.

    The first run that is judged leaves its judges; it has to be one without faults.

    clean  what it came to, once its owner has put it here
    """

    def __init__(self) -> None:
        self.clean: Outcome | None = None
        self._prepared: dict[tuple[int, int], LayerWeights] = {}
        self._judges: Mapping[str, Judge] = {}
        self._clean: Reports = {}

    def rank_weights(self, plan: LayerPlan, rank: int) -> LayerWeights:
        """What a rank holds under a plan; prepared once, and the same tensors ever after."""
        key = plan.fingerprint(), rank
        if key not in self._prepared:
            self._prepared[key] = rank_weights(plan, rank)
        return self._prepared[key]

    def judges(
        self, fresh: Mapping[str, Judge], reports: Reports, faults: Sequence[ArmedFault]
    ) -> Mapping[str, Judge]:
        """The judges of the first run, where every rank has its weights; ``fresh`` ones elsewhere.

        Args:
            fresh: judges that have seen nothing, by mode.
            reports: of this run.
            faults: of this run; a faulty judge is not another's.
        """
        if not self._judges:
            self._judges, self._clean = fresh, reports
        if any(armed.fault.kind.is_of_the_judge for armed in faults):
            return fresh
        same = {mode for mode in fresh if _same_weights(self._clean[mode], reports[mode])}
        return {mode: (self._judges if mode in same else fresh)[mode] for mode in fresh}

    def judged_before(
        self, reports: Sequence[Sequence[RankReport]], faults: Sequence[ArmedFault]
    ) -> "Outcome | None":
        """``clean``, if a run's forwards are its own bit for bit, and so is what judges them.

        Args:
            reports: of every forward, in order.
            faults: of this run.
        """
        if self.clean is None or any(armed.fault.kind.is_of_the_judge for armed in faults):
            return None
        before = [run.reports for run in self.clean.runs]
        has_same_calls = [[one.calls for one in ranks] for ranks in before] == [
            [one.calls for one in ranks] for ranks in reports
        ]
        return self.clean if has_same_calls and not traces_differ(before, reports) else None


def traces_differ(
    clean: Sequence[Sequence[RankReport]], other: Sequence[Sequence[RankReport]]
) -> bool:
    """Whether any bit of any traced tensor differs between two runs of the same forwards.

    It asks no check, so that a check that sees nothing cannot hide that there was something.
    """
    return any(
        one.trace.stages.keys() != two.trace.stages.keys()
        or not all(_same_tensors(one.trace[stage], two.trace[stage]) for stage in one.trace.stages)
        for ranks, again in zip(clean, other, strict=True)
        for one, two in zip(ranks, again, strict=True)
    )


def _same_weights(one: Sequence[RankReport], other: Sequence[RankReport]) -> bool:
    return all(
        _same_tensors(a.trace[Stage.WEIGHTS], b.trace[Stage.WEIGHTS])
        for a, b in zip(one, other, strict=True)
    )


def _same_tensors(one: StageTensors, other: StageTensors) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
