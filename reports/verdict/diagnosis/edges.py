"""Parts of rows and tiles: columns lost or overwritten, rows that nobody wrote, padded columns."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.golden import E4M3_MAX
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import GROUPED_STAGES, Case
from reports.verdict.diagnosis.content import Table, identify, listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice


def tail_columns(case: Case) -> Iterator[Explanation]:
    """Columns from one on: zero, unwritten, or the first ones of another row.

    Any column may be the first, which is a choice that has to be made up for.
    """
    if not case.holds_rows:
        return
    wrong_columns = case.wrong.any(0).nonzero()[:, 0]
    first, width = int(wrong_columns[0]), case.got.shape[1]
    if first == 0:
        return
    tail = case.got[:, first:]
    if first >= _columns_in_use(case):
        yield Explanation(
            mistake=Mistake.PADDING_LEAK,
            words=f"columns of padding {first}..{width - 1} hold numbers: "
            f"{float(tail[0, 0]):.6g} in the first such row",
            explains=tail.isfinite().any(1),
            is_guess=True,
        )
        return
    forms = (("zero", (tail == 0).all(1)), ("unwritten", is_unwritten(tail)))
    for how, explains in forms:
        yield Explanation(
            mistake=Mistake.TAIL_COLUMNS,
            words=f"columns {first}..{width - 1} are {how}",
            explains=explains,
            cost=bits_of_choice(width * len(forms)),
        )
    yield from _overlapping(case, tail, first)


def _columns_in_use(case: Case) -> int:
    """Columns in front of those that are padding: due zero in every row, where the layer pads."""
    width, layer = case.got.shape[1], case.layer
    due = (case.evidence.want != 0).any(0).nonzero()[:, 0]
    in_use = int(due[-1]) + 1 if len(due) else 0
    if width != layer.expert_hidden_size:
        return in_use if case.stage in GROUPED_STAGES else width
    return max(in_use, layer.hidden_size)


def _overlapping(case: Case, tail: Tensor, first: int) -> Iterator[Explanation]:
    """The end of a row is the beginning of another: buffers overlap."""
    heads = Table(values=case.evidence.want[:, : tail.shape[1]], rows=case.evidence.rows)
    match = identify(tail, heads)
    said = [
        f"{name_of(case.rows, at)} ends with the beginning of "
        f"{name_of(heads.rows, int(match.row[at]), case.rank)}"
        for at in match.is_found.nonzero()[:, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.TAIL_COLUMNS,
        words=f"columns from {first} on overwritten by another row: {listed(said)}",
        explains=match.is_found,
        cost=bits_of_choice(case.got.shape[1]) + bits_of_choice(len(heads.rows), len(said)),
    )


def unwritten_rows(case: Case) -> Iterator[Explanation]:
    """Rows of no number at all: past a tile, a segment or a launch."""
    if case.stage not in GROUPED_STAGES or case.is_scale:
        return
    unwritten = is_unwritten(case.got)
    if not bool(unwritten.any()):
        return
    yield Explanation(
        mistake=Mistake.TAIL_ROWS,
        words=f"rows unwritten: {_which(case, unwritten)}",
        explains=unwritten,
    )


def is_unwritten(rows: Tensor) -> Tensor:
    """[W] bool: rows of NaN alone, or of one number that is a dtype's largest, or half of it."""
    largest = [torch.finfo(dtype).max / 2 for dtype in (torch.bfloat16, torch.float32)]
    fills = torch.tensor([*largest, E4M3_MAX], dtype=torch.float64)
    first = rows[:, :1]
    is_fill = (rows == first).all(1) & torch.isin(first[:, 0].abs(), fills)
    return rows.isnan().all(1) | is_fill


def _which(case: Case, unwritten: Tensor) -> str:
    """Expert by expert, in the order of grouped rows: the last ones, the first ones, or some."""
    placed = case.subject.placed[case.rank]
    said = []
    for expert in torch.unique(case.rows.expert[unwritten]).tolist():
        order = placed.row[placed.rows.expert == expert].sort().values
        rows = placed.row[case.within[unwritten & (case.rows.expert == expert)]]
        is_lost = torch.isin(order, rows)
        count, total = int(is_lost.sum()), len(order)
        kind = "last" if bool(is_lost[total - count :].all()) else "some"
        kind = "first" if bool(is_lost[:count].all()) and count < total else kind
        said.append(f"expert {expert}: the {kind} {count} of {total}")
    return listed(said)
