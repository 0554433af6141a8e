"""Rows that are another's: exchanged, shifted, of another rank, of padding, or left from before."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case, traced_rows
from reports.verdict.diagnosis.content import Match, Same, Table, identify, listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.tables import tables_of
from reports.verdict.evidence import Evidence
from reports.verdict.rows import Rows
from reports.verdict.rules import code_limits


def misplaced_rows(case: Case) -> Iterator[Explanation]:
    """Whole rows that are those of another token, of padding, or that nobody wrote."""
    if not case.holds_rows:
        return
    found, names, tokens = case.none(), dict[int, str](), case.none()
    num_choices = 0
    for table in tables_of(case):
        match = identify(case.got, table, _same(case, table))
        fresh = match.is_found & ~found & _of_another(case, table.rows, match)
        names |= _names(case, table.rows, match, fresh)
        found, num_choices = found | fresh, num_choices + len(table.rows)
        tokens[fresh] = table.rows.token[match.row[fresh]] >= 0
    zero = (case.got == 0).all(1) & ~found
    zero &= zero.cumsum(0) <= int(found.sum())  # whoever moves rows leaves no more places empty
    cost = bits_of_choice(num_choices, int(found.sum()))
    if bool(found.any()) and bool(tokens.any()):
        yield _moved(case, found | zero, names, int(zero.sum()), cost)
    elif bool(found.any()):
        yield Explanation(
            mistake=Mistake.PADDING_LEAK,
            words=f"padding is read as data: {_said(case, found, names)}",
            explains=found,
            cost=cost,
        )


def stale_rows(case: Case) -> Iterator[Explanation]:
    """Rows that hold what stood in their place in the forward before."""
    earlier, places = case.scene.earlier, case.places
    if earlier is None or places is None:
        return
    held = case.before(earlier).traced
    if held is None or bool((places >= len(held)).any()):
        return
    left = traced_rows(held, places)
    now = traced_rows(case.traced, places) if case.traced is not None else case.got
    if left.shape == now.shape:
        is_left = ((left == now) | (left.isnan() & now.isnan())).all(1)
        names = [name_of(case.rows, at) for at in is_left.nonzero()[:, 0].tolist()]
        yield Explanation(
            mistake=Mistake.STALE,
            words=f"stale: {listed(names)}: as the forward before left it in that place",
            explains=is_left,
        )


def _same(case: Case, table: Table) -> Same | None:
    """Codes may round as the golden's may, values may be off by the band; moves may not differ."""
    if table.values is not case.evidence.want:
        return None
    got, (low, high) = case.got, limits_of(case.evidence)

    def same(which: Tensor, candidate: Tensor) -> Tensor:
        mine = got[which]
        return ((mine >= low[candidate]) & (mine <= high[candidate])).all(1)

    return same


def limits_of(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(lowest, highest) [N, C] of what each cell may hold; of codes, as they may round."""
    if evidence.quantiser is not None:
        return code_limits(evidence.quantiser.want.scaled, evidence.quantiser.noise)
    return evidence.want - evidence.band, evidence.want + evidence.band


def _of_another(case: Case, rows: Rows, match: Match) -> Tensor:
    """[W] bool: what was found is not the row itself, as it was left."""
    mine, found = case.rows, rows[match.row.clamp(min=0)]
    return (mine.token != found.token) | (mine.slot != found.slot) | (found.token < 0)


def _names(case: Case, rows: Rows, match: Match, fresh: Tensor) -> dict[int, str]:
    """What each newly identified row turned out to be, by its number among the wrong ones."""
    return {
        at: name_of(rows, int(match.row[at]), case.rank)
        + (" (others hold the same)" if match.is_ambiguous[at] else "")
        for at in fresh.nonzero()[:, 0].tolist()
    }


def _said(case: Case, found: Tensor, names: dict[int, str]) -> str:
    """Which row holds whose."""
    at_rows = found.nonzero()[:, 0].tolist()
    return listed([f"{name_of(case.rows, at)} holds {names[at]}" for at in at_rows if at in names])


def _moved(
    case: Case, explains: Tensor, names: dict[int, str], zeros: int, cost: float
) -> Explanation:
    """Rows of others, and with them those that are zero: whoever shifts rows runs out of them."""
    found = torch.zeros_like(explains)
    found[list(names)] = True
    words = f"rows {_how(case, names)}: {_said(case, found, names)}"
    words += f"; {zeros} rows are zero" if zeros else ""
    return Explanation(mistake=Mistake.ROWS_MISPLACED, words=words, explains=explains, cost=cost)


def _how(case: Case, names: dict[int, str]) -> str:
    """Exchanged, if rows stand in each other's place; else misplaced."""
    mine = {at: name_of(case.rows, at) for at in names}
    holder = {name: names[at] for at, name in mine.items()}
    pairs = bool(holder) and all(holder.get(other) == name for name, other in holder.items())
    return "exchanged" if pairs else "misplaced"
