"""Scales found in the wrong place of memory: another layout, or another stride."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case, numbers
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.words import bytes_of, exponents, unsigned, words_of
from reports.verdict.rows import take_rows


def misread_memory(case: Case) -> Iterator[Explanation]:
    """The whole tensor as it should lie in memory, read the wrong way round."""
    memory, places = _due_memory(case), case.compared_places
    if memory is None or places is None or case.traced is None:
        return
    got = _words_or_numbers(take_rows(case.traced, places))
    is_wrong = torch.zeros(len(places), dtype=torch.bool)
    is_wrong[case.within] = True
    readings = list(_readings(case, memory))
    for words, value in readings:
        found = value[places]
        same = ((found == got) | (found.isnan() & got.isnan())).all(1)
        is_law = bool(same[~is_wrong].all())  # what is right has to come out right
        yield Explanation(
            mistake=Mistake.SCALE_FORM,
            words=f"scales found in the wrong place of memory: {words}",
            explains=same[is_wrong] & is_law,
            cost=bits_of_choice(len(readings)),
        )


def _due_memory(case: Case) -> Tensor | None:
    """[M, N] words or fp32 numbers of all rows: what is due where rows were compared."""
    traced = case.traced
    if traced is None or not case.is_scale or traced.dim() != 2:
        return None
    index = case.compared_places
    if index is None:
        return None
    memory = _words_or_numbers(traced).clone()
    due = case.evidence.want[case.evidence.rows.rank == case.rank]
    if traced.dtype == torch.int32:
        is_word = case.evidence.quantiser is None
        due = (unsigned(due.to(torch.int64)) if is_word else words_of(exponents(due))).double()
    memory[index] = due
    return memory


def _words_or_numbers(rows: Tensor) -> Tensor:
    """[M, N] float64: packed words as unsigned numbers, fp32 as they are."""
    held = numbers(rows)
    return unsigned(held) if rows.dtype == torch.int32 else held


def _readings(case: Case, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(words, [M, N] what a reader finds)."""
    num_rows, width = memory.shape
    assert case.traced is not None
    steps = case.traced.stride()
    if steps[0] == 1 and steps[1] >= num_rows:
        in_columns = torch.nn.functional.pad(memory, (0, 0, 0, steps[1] - num_rows)).T.flatten()
        yield (
            "columns lie along the fastest axis where rows are due",
            in_columns[: num_rows * width].view(num_rows, width),
        )
    if case.traced.dtype != torch.int32 or not case.num_groups:
        return
    groups, places = case.num_groups, case.compared_places
    assert places is not None
    order = places.sort().values
    for rows in (torch.arange(num_rows), order):
        held = memory[rows].to(torch.int64)
        found = bytes_of(held).flatten()[: len(rows) * groups].view(len(rows), groups)
        read = memory.clone()
        read[rows] = words_of(found).double()
        yield f"the stride of {groups} exponents, without their padding to whole words", read
