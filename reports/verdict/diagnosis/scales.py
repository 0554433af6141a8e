"""Scales that are wrong: off by powers of two, inverted, of another form, or somebody else's."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import Table, identify, listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.scale_sides import ScaleSides, scale_sides
from reports.verdict.diagnosis.scale_words import forms_of
from reports.verdict.rows import Rows

PATTERNS = 32
"""Sets of wrong blocks that other rows are searched for, each by itself."""


def scales_wrong(case: Case) -> Iterator[Explanation]:
    """Every law of scales on the rows' scales that a comparison found."""
    sides = scale_sides(case)
    if sides is None:
        return
    moved = case.sibling(case.tensor.removesuffix("_scale")) is not None
    yield from laws_of(sides, rows_moved=moved and case.evidence.quantiser is None)


def laws_of(sides: ScaleSides, *, rows_moved: bool = False) -> Iterator[Explanation]:
    """What may have become of scales; ``rows_moved``: their rows' values are another's, too."""
    for found in (
        *_without_floor(sides),
        *_factor(sides),
        *_rounded(sides),
        *_form(sides),
        *_of_other_blocks(sides),
        *_of_other_rows(sides, rows_moved=rows_moved),
        *_of_parts_of_rows(sides, rows_moved=rows_moved),
        *_scattered(sides),
    ):
        bits = sides.bits_of(found.explains) if found.evidence is None else found.evidence
        yield replace(found, evidence=bits)


def _factor(sides: ScaleSides) -> Iterator[Explanation]:
    """One power of two in every wrong group; as many might be meant as lie no farther from 1.

    The first wrong scale says which one, so it proves nothing: of that alone it is a mere look.
    """
    ratio = sides.got / sides.due
    wrong = ratio[sides.wrong]
    if not len(wrong) or not bool(wrong.isfinite().all()) or bool((wrong <= 0).any()):
        return
    slack = 0.0 if sides.is_packed else 2 * torch.finfo(torch.float32).eps
    first = float(wrong[0])
    step = round(float(torch.log2(wrong[0])))
    if step == 0 or abs(first - 2.0**step) > slack * 2.0**step:
        return
    is_one = ((ratio - first).abs() <= slack * first) | ~sides.wrong
    blocks = sides.wrong.any(0).nonzero()[:, 0].tolist()
    yield Explanation(
        mistake=Mistake.SCALE_EXPONENT,
        words=f"scale exponent off by {step:+d}, every wrong scale is {first:.6g} times what is "
        f"due; blocks {listed([str(block) for block in blocks])} of {_rows_said(sides)}",
        explains=is_one.all(1),
        cost=bits_of_choice(2 * abs(step)),
        evidence=sides.bits_of(is_one.all(1), known=1),
    )


def _without_floor(sides: ScaleSides) -> Iterator[Explanation]:
    """Scales of groups of zeros that are as small as a scale can be."""
    if sides.source is None:
        return
    is_blank = sides.source[: len(sides.got)] == 0
    least = sides.got <= torch.finfo(torch.float32).tiny
    yield Explanation(
        mistake=Mistake.SCALE_FLOOR,
        words="groups of zeros quantised without a least magnitude: their scale is "
        f"{float(sides.got[sides.wrong].min()):.4g}",
        explains=((is_blank & least) | ~sides.wrong).all(1),
    )


def _rounded(sides: ScaleSides) -> Iterator[Explanation]:
    """The next power of two above or below, or the reciprocal."""
    due = sides.all_due
    power = torch.log2(due)
    laws = (
        (
            Mistake.SCALE_LATE,
            "scales rounded up to powers of two under codes of the exact ones",
            torch.exp2(power.ceil()),
        ),
        (Mistake.SCALE_EXPONENT, "scales rounded down", torch.exp2(power.floor())),
        (Mistake.SCALE_FORM, "scales inverted: each is its reciprocal", 1 / due),
    )
    for mistake, words, value in laws:
        ratio = (value / due)[: len(sides.got)][sides.wrong]
        yield Explanation(
            mistake=mistake,
            words=f"{words}, {float(ratio.mean()):.4g} times what is due on average",
            explains=sides.explains_all(value),
            cost=bits_of_choice(len(laws)),
        )


def _form(sides: ScaleSides) -> Iterator[Explanation]:
    """Bytes read as another form than they were written in."""
    forms = list(forms_of(sides))
    for words, value in forms:
        yield Explanation(
            mistake=Mistake.SCALE_FORM,
            words=f"scales of another form: {words}; {_first_said(sides)}",
            explains=sides.explains_all(value),
            cost=bits_of_choice(len(forms)),
        )


def _of_other_blocks(sides: ScaleSides) -> Iterator[Explanation]:
    """Scales of another block of the same row: a step aside, or one for several."""
    groups = sides.due.shape[1]
    blocks = torch.arange(groups)
    steps = [(f"{step} further on", (blocks + step) % groups) for step in range(1, groups)]
    wide = [(f"first of {n}", blocks // n * n) for n in (2, 4, 8, 16) if n < 2 * groups]
    coarse = [(f"one of {n} times as many columns", blocks // n) for n in (2, 4, 8)]
    laws = [*steps, *wide, *coarse]
    laws.sort(key=lambda law: not bool(sides.explains(sides.due[:, law[1]]).all()))
    for words, donor in laws:  # first those that no right scale of the rows contradicts
        donated = sides.due[:, donor]
        wrong = sides.wrong.nonzero()
        if not len(wrong):
            return
        at, block = wrong[0].tolist()
        yield Explanation(
            mistake=Mistake.SCALE_DONOR,
            words=f"the scale of block {block} of {_name(sides, at)} is that of its block "
            f"{int(donor[block])} ({words})",
            explains=sides.explains(torch.where(sides.wrong, donated, sides.due)),
            cost=bits_of_choice(len(laws)),
        )


def _of_other_rows(sides: ScaleSides, *, rows_moved: bool) -> Iterator[Explanation]:
    """Scales of another row, or of padding; where rows run out, nobody's."""
    found = torch.zeros(len(sides.got), dtype=torch.bool)
    said, of_tokens, choices = [], False, 0
    for table in sides.donors:
        match = identify(sides.got, table)
        fresh = match.is_found & ~found & ~_is_itself(sides.rows, table.rows, match.row)
        for at in fresh.nonzero()[:, 0].tolist():
            donor = int(match.row[at])
            of_tokens |= int(table.rows.token[donor]) >= 0 or int(table.rows.expert[donor]) >= 0
            said.append(f"{_name(sides, at)} has those of {name_of(table.rows, donor)}")
        found, choices = found | fresh, choices + len(table.rows)
    unwritten = sides.got.isnan().all(1) & ~found
    nobody = f"{int(unwritten.sum())} rows have none that was written" if unwritten.any() else ""
    if not said and not nobody:
        return
    mistake = Mistake.SCALE_DONOR if of_tokens else Mistake.PADDING_LEAK
    if of_tokens and rows_moved:
        mistake = Mistake.ROWS_MISPLACED
    yield Explanation(
        mistake=mistake,
        words="scales of others: " + "; ".join(part for part in (listed(said), nobody) if part),
        explains=found | unwritten,
        cost=bits_of_choice(choices, int(found.sum())),
    )


def _of_parts_of_rows(sides: ScaleSides, *, rows_moved: bool) -> Iterator[Explanation]:
    """The wrong scales of a row are those that another row of the tensor has in the same blocks."""
    if not sides.donors or not len(sides.got):
        return
    due, rows = sides.donors[0].values, sides.donors[0].rows
    if due.shape[1] != sides.got.shape[1]:
        return
    found, said = torch.zeros(len(sides.got), dtype=torch.bool), list[str]()
    patterns, of_row = torch.unique(sides.wrong, dim=0, return_inverse=True)
    for number, blocks in enumerate(patterns[:PATTERNS]):
        here = (of_row == number).nonzero()[:, 0]
        match = identify(sides.got[here][:, blocks], Table(values=due[:, blocks], rows=rows))
        own = _is_itself(sides.rows[here], rows, match.row)
        is_donated = match.is_found & ~own
        found[here] = is_donated & bool(~blocks.all())
        said += [
            f"{_name(sides, int(at))} has those of {name_of(rows, int(donor))}"
            for at, donor in zip(here[is_donated], match.row[is_donated], strict=True)
        ]
    yield Explanation(
        mistake=Mistake.ROWS_MISPLACED if rows_moved else Mistake.SCALE_DONOR,
        words=f"single scales of others: {listed(said)}",
        explains=found,
        cost=bits_of_choice(len(rows), int(found.sum())),
    )


def _scattered(sides: ScaleSides) -> Iterator[Explanation]:
    """Powers of two off, without a law: what wrong packing looks like."""
    power = torch.log2(sides.got / sides.due)
    is_power = (power == power.round()) | ~sides.wrong
    off = power[sides.wrong & power.isfinite()]
    if not sides.is_packed or not len(off):
        return
    yield Explanation(
        mistake=Mistake.SCALE_FORM,
        words=f"scales off by powers of two that follow no law, from {int(off.min()):+d} to "
        f"{int(off.max()):+d}: bytes packed or read in another form",
        explains=is_power.all(1),
        cost=math.inf,
        is_guess=True,
    )


def _is_itself(rows: Rows, donors: Rows, donor: Tensor) -> Tensor:
    """[W] bool: the donor of a row, -1 = none, is the same row as another tensor holds it."""
    at = donor.clamp(min=0)
    known = (donor >= 0) & (rows.token >= 0)
    slot = donors.slot[at]
    return known & (rows.token == donors.token[at]) & ((rows.slot == slot) | (slot < 0))


def _name(sides: ScaleSides, at: int) -> str:
    return name_of(sides.rows, at)


def _rows_said(sides: ScaleSides) -> str:
    return listed([_name(sides, at) for at in range(len(sides.got))])


def _first_said(sides: ScaleSides) -> str:
    """The first wrong scale."""
    wrong = sides.wrong.nonzero()
    if not len(wrong):
        return ""
    at, block = wrong[0].tolist()
    return (
        f"block {block} of {_name(sides, at)} is scaled by {float(sides.got[at, block]):.4g}, "
        f"due {float(sides.due[at, block]):.4g}"
    )
