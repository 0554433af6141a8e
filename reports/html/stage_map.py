"""The rank x stage map: which stage on which rank erred, and how close the others came."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe.formats import Stage
from reports.html.wording import cell_number, number
from reports.result import CheckVerdict, Mode, StageRow

RANKS_SHOWN_OPEN = 16

SYMBOLS = {
    CheckVerdict.AGREE: "✓",
    CheckVerdict.DISCREPANCY: "≠",
    CheckVerdict.FAILED: "!",
    CheckVerdict.NOT_APPLICABLE: "-",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One stage on one rank: a symbol, own error / band in short, and both errors as a title."""

    style: str
    symbol: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class StageMap:
    """One mode's map; ``folded`` are the rows a page of many ranks keeps closed."""

    mode: Mode
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]
    folded: tuple[tuple[int, tuple[Cell, ...]], ...]


def stage_maps(rows: Sequence[StageRow]) -> list[StageMap]:
    """One map a mode that has rows, in the order exact, random, file."""
    return [
        _stage_map(mode, [row for row in rows if row.mode is mode])
        for mode in Mode
        if any(row.mode is mode for row in rows)
    ]


def _stage_map(mode: Mode, rows: Sequence[StageRow]) -> StageMap:
    by_place = {(row.rank, row.stage): row for row in rows}
    ranks = sorted({row.rank for row in rows})
    loud = {
        row.rank for row in rows if row.verdict in (CheckVerdict.DISCREPANCY, CheckVerdict.FAILED)
    }
    open_ranks = set(ranks) if len(ranks) <= RANKS_SHOWN_OPEN else loud
    table = [
        (rank, tuple(_cell(rank, stage, by_place.get((rank, stage))) for stage in Stage))
        for rank in ranks
    ]
    return StageMap(
        mode=mode,
        rows=tuple(line for line in table if line[0] in open_ranks),
        folded=tuple(line for line in table if line[0] not in open_ranks),
    )


def _cell(rank: int, stage: Stage, row: StageRow | None) -> Cell:
    if row is None:
        return Cell("void", "·", "", f"{stage}, rank {rank}: not captured")
    own = "no own error" if row.own_worst is None else f"{number(row.own_worst, 4)} of the band"
    title = f"{stage}, rank {rank}: {own}, end to end {number(row.end_to_end_worst, 3)}"
    return Cell(row.verdict.value, SYMBOLS[row.verdict], cell_number(row.own_worst), title)
