"""Which own error an end-to-end difference comes from, if any."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.captured import NotCapturedError
from reports.verdict.compared import BAND
from reports.verdict.deviation import Deviation
from reports.verdict.exact_compared import EXACT
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import Rows
from reports.verdict.rules import QUANTISER, ROUTER
from reports.verdict.stage_weights import PREPARATION
from reports.verdict.stores import STORES
from reports.verdict.subject import Subject

OF_VALUES: Final = frozenset({PREPARATION, MOVES, BAND, STORES, QUANTISER, ROUTER})
"""Checks that find values to be other than due; a wrong count or stride changes none by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Which tokens a difference concerns, and the experts and ranks that they came through."""

    tokens: frozenset[int]
    experts: frozenset[int]
    ranks: frozenset[int]

    def meets(self, earlier: "_Path") -> bool:
        """Whether an earlier error lies on it: by token and expert, or by rank if it has neither.

        A coordinate that only one of them has decides nothing.
        """
        pairs = ((self.tokens, earlier.tokens), (self.experts, earlier.experts))
        named = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
        if not named:
            return bool(self.ranks & earlier.ranks)
        return all(mine & theirs for mine, theirs in named)


def at_its_cause(
    deviation: Deviation, found: Ledger, ledger: Ledger, subject: Subject
) -> Deviation:
    """The difference where it came from: where an earlier stage is known to be wrong, that is it.

    Args:
        deviation: of certified cells.
        found: has its evidence.
        ledger: what the other checks entered.
        subject: knows which routes a token took.
    """
    mine = _with_routes(_path(deviation, found), deviation, subject)
    earlier = [
        one
        for one in ledger.deviations
        if one.check in OF_VALUES
        and one.stage.position < deviation.stage.position
        and mine.meets(_path(one, ledger))
    ]
    if not earlier:
        return deviation
    cause = min(earlier, key=lambda one: one.blame)
    seen = f"inherited: certified cells of {deviation.tensor} differ in stage {deviation.stage} "
    return replace(cause, check=EXACT, detail=f"{seen}on rank {deviation.rank}; {deviation.detail}")


def _path(deviation: Deviation, ledger: Ledger) -> _Path:
    """Of all rows of its rank that are wrong, or of the one that it names."""
    evidence = ledger.evidence.get(deviation)
    tokens, experts = {deviation.token}, {deviation.expert}
    if evidence is not None:
        wrong = evidence.wrong_rows
        rows = wrong[(wrong.rank == deviation.rank).nonzero()[:, 0]]
        tokens.update(rows.token.tolist())
        experts.update(rows.expert.tolist())
    return _Path(tokens=_known(tokens), experts=_known(experts), ranks=frozenset({deviation.rank}))


def _with_routes(path: _Path, deviation: Deviation, subject: Subject) -> _Path:
    """Behind the experts, with those that the tokens went through, and their ranks.

    A rank's own partial comes from its own experts.
    """
    if path.experts or deviation.stage.position <= Stage.GEMM2.position:
        return path
    try:
        rows = subject.route_rows
    except NotCapturedError:
        return path
    taken = _rows_of(rows, path)
    if deviation.stage is Stage.POST_PERMUTE:
        taken = taken & (rows.rank == deviation.rank)
    return replace(
        path,
        experts=_known(set(rows.expert[taken].tolist())),
        ranks=path.ranks | _known(set(rows.rank[taken].tolist())),
    )


def _rows_of(rows: Rows, path: _Path) -> Tensor:
    return torch.isin(rows.token, torch.tensor(sorted(path.tokens), dtype=torch.int64))


def _known(coordinates: set[int | None] | set[int]) -> frozenset[int]:
    return frozenset(one for one in coordinates if one is not None and one >= 0)
