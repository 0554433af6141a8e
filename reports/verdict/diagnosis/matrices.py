"""Prepared weights that are wrong: another expert's, other rows or columns, other scales."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.decode import BLOCK, num_words, scales_f64, spread_blocks
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import Table
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.preparations import other_preparations
from reports.verdict.diagnosis.scale_sides import ScaleSides
from reports.verdict.diagnosis.scales import laws_of
from reports.verdict.rows import Rows
from reports.verdict.stage_weights import same_values

FLOAT64_ROUNDINGS = 4 * torch.finfo(torch.float64).eps
"""Of a ratio of two products, and of the product with it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldMatrix:
    """One wrong matrix.

    slot       local slot that holds it; the shared expert's is 0
    group      experts or shared
    name       w13 or w2
    got, want  [N, K] float64, all rows
    """

    slot: int
    group: str
    name: str
    got: Tensor
    want: Tensor

    @cached_property
    def is_right(self) -> Tensor:
        """[N] bool rows that are as they should be."""
        return same_values(self.got, self.want).all(1)


def matrices_wrong(case: Case) -> Iterator[Explanation]:
    """Every law of weights; the W wrong rows are rows of the matrix."""
    held = _held(case)
    if held is None:
        return
    others = list(_other_experts(case, held))
    yield from others
    if any(one.share == 1 for one in others):
        return  # of a whole matrix, bit for bit
    yield from _reordered(case, held)
    yield from _padding(case, held)
    laws = list(other_preparations(case, held.slot, held.group, held.name))
    for mistake, words, value in laws:
        yield _law(case, held, mistake, words, value, len(laws))
    yield from _scales(case, held)


def _held(case: Case) -> HeldMatrix | None:
    """The matrix of a deviation of prepared weights."""
    group, _, name = case.tensor.partition(".")
    evidence = case.evidence
    if case.stage is not Stage.WEIGHTS or evidence.local is None:
        return None
    sides = (evidence.got, evidence.want)
    if len(evidence.got) < case.num_compared:
        sides = _both_sides(case, evidence.local, group, 0 if name == "w13" else 1)
    return HeldMatrix(slot=evidence.local, group=group, name=name, got=sides[0], want=sides[1])


def _both_sides(case: Case, slot: int, group: str, matrix: int) -> tuple[Tensor, Tensor]:
    """What lies in a slot and what is due there, prepared once more: few of its rows are kept."""
    weights, expert = case.scene.weights, case.deviation.expert
    if group == "shared":
        held, due = weights.shared(case.rank), weights.golden_shared(case.rank)
    else:
        assert expert is not None
        held, due = weights.expert(case.rank, slot), weights.golden_expert(case.rank, expert)
    assert held is not None
    assert due is not None
    return held[matrix], due[matrix]


def _law(
    case: Case, held: HeldMatrix, mistake: Mistake, words: str, value: Tensor, alternatives: int
) -> Explanation:
    """Wrong rows that a law of the whole matrix gives, bit for bit; no right row contradicts it."""
    explains, first = case.none(), case.within[:1]
    if value.shape == held.got.shape and bool(_alike(held.got[first], value[first]).all()):
        fits = _alike(held.got, value).all(1)
        explains = fits[case.within] & bool(fits[held.is_right].all())
    return Explanation(
        mistake=mistake,
        words=f"{_place(case, held)}: {words}",
        explains=explains,
        cost=bits_of_choice(alternatives),
    )


def _alike(got: Tensor, value: Tensor) -> Tensor:
    """Cells that are equal up to float64's own roundings."""
    slack = FLOAT64_ROUNDINGS * value.abs()
    return same_values(got, value) | ((got - value).abs() <= slack)


def _place(case: Case, held: HeldMatrix) -> str:
    of_whom = "shared expert" if held.group == "shared" else f"expert {case.deviation.expert}"
    return f"{held.name} of {of_whom}"


def _other_experts(case: Case, held: HeldMatrix) -> Iterator[Explanation]:
    """The expert whose matrix it is: one whose first row is the same is prepared, no other."""
    if held.group == "shared":
        return
    layer, weights = case.layer, case.scene.weights
    matrix = 0 if held.name == "w13" else 1
    for expert in range(layer.num_experts):
        first = weights.first_row(case.rank, expert, matrix)
        if expert == case.deviation.expert or not torch.equal(first, held.got[0]):
            continue
        value = weights.golden_expert(case.rank, expert)[matrix]
        words = f"the slot holds expert {expert}'s weights"
        yield _law(case, held, Mistake.WRONG_EXPERT, words, value, layer.num_experts - 1)


def _reordered(case: Case, held: HeldMatrix) -> Iterator[Explanation]:
    """Halves exchanged, rows that take turns, pairs of columns exchanged."""
    order = torch.arange(len(held.want))
    if held.name == "w13":
        orders = (
            ("up rows stand in front of gate rows", order.roll(len(order) // 2)),
            ("gate and up rows are read as if they took turns", order.view(-1, 2).T.flatten()),
        )
        size = case.layer.weight_group(shared=held.group == "shared")
        for words, rows in orders:
            rows_read = held.want[rows]
            for value in (rows_read, _in_blocks_of(held.got, rows_read, size)):
                yield _law(case, held, Mistake.GATE_UP_SWAPPED, words, value, 2 * len(orders))
    if held.want.shape[1] % 2 == 0:
        pairs = torch.unflatten(held.want, 1, (-1, 2)).flip(-1).flatten(1)
        words = "the two fp4 codes of a byte are read the wrong way round"
        yield _law(case, held, Mistake.SCALE_FORM, words, pairs, 1)


def _in_blocks_of(got: Tensor, value: Tensor, size: int) -> Tensor:
    """``value`` with the one factor that each block of a row has; itself where there is none.

    Rows that moved while the scales of blocks stayed.
    """
    ratio = group_ratio(got, value, size)
    if ratio is None:
        return value
    spread = ratio.repeat_interleave(size, dim=1)[:, : value.shape[1]]
    return torch.where(spread.isnan(), value, value * spread)


def _padding(case: Case, held: HeldMatrix) -> Iterator[Explanation]:
    """Rows or columns that are zero in every expert, and hold something."""
    filled = case.wrong & (case.want == 0) & (case.got != 0)
    is_padding = (filled | ~case.wrong).all(1)
    if not bool((held.want == 0).all(1).any() | (held.want == 0).all(0).any()):
        return
    yield Explanation(
        mistake=Mistake.PADDING_LEAK,
        words=f"{_place(case, held)}: padding holds numbers in {int(is_padding.sum())} rows",
        explains=is_padding,
        is_guess=True,
    )


def _scales(case: Case, held: HeldMatrix) -> Iterator[Explanation]:
    """The right codes under wrong scales."""
    sides = _sides_of_matrix(case, held)
    if sides is not None:
        slots = _slots_with_these_scales(case, held)
        yield from laws_of(sides)
        for slot, expert in slots:
            yield Explanation(
                mistake=Mistake.SCALE_DONOR,
                words=f"{_place(case, held)}: codes of its own under the scales of slot {slot}, "
                f"expert {expert}",
                explains=~case.none(),
                cost=bits_of_choice(case.layer.slots_per_rank),
                evidence=sides.bits_of(~case.none()),
            )


def _sides_of_matrix(case: Case, held: HeldMatrix) -> ScaleSides | None:
    """Scales of rows by what the values are off by; None where codes differ, too."""
    scale = case.subject.stage(Stage.WEIGHTS, case.rank).get(f"{case.tensor}.scale")
    size = case.layer.weight_group(shared=held.group == "shared")
    is_packed = scale is not None and scale.dtype == torch.int32
    if scale is None or held.got.shape[1] % size:
        return None
    ratio = group_ratio(held.got, held.want, size)
    if ratio is None:
        return None
    got = _scale_of_groups(scale[held.slot], held.got.shape, size)
    due = torch.where(ratio.isnan(), got, got / ratio)
    rows = Rows.of_rank(case.rank, len(got))
    expert = torch.full((len(got),), -1 if case.deviation.expert is None else case.deviation.expert)
    named = Rows(rank=rows.rank, token=rows.token, slot=torch.arange(len(got)), expert=expert)
    source, right = None, held.is_right.nonzero()[:, 0]
    if size == BLOCK:
        source = _block_amax(held.want)[torch.cat([case.within, right])]
    return ScaleSides(
        rows=named[case.within],
        got=got[case.within],
        due=due[case.within],
        right=due[right],
        is_packed=is_packed,
        num_words=num_words(got.shape[1]),
        unit=case.within // BLOCK if size == BLOCK else None,
        source=source,
        donors=(Table(values=due, rows=named),),
    )


def _block_amax(matrix: Tensor) -> Tensor:
    """[N, K / 128] largest magnitude of the block of each row and 128 columns."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3))
    return blocks.repeat_interleave(BLOCK, dim=0)[:rows]


def group_ratio(got: Tensor, want: Tensor, size: int) -> Tensor | None:
    """[N, K / size] the one factor of each group of columns, NaN where both are zero.

    None if some group has several, as where codes differ.
    """
    if got.shape[1] % size:
        return None
    ratio = torch.unflatten(got / want, 1, (-1, size))
    blank = ((got == 0) & (want == 0)).view_as(ratio)
    low = ratio.masked_fill(blank, torch.inf).amin(-1)
    high = ratio.masked_fill(blank, -torch.inf).amax(-1)
    empty = blank.all(-1)
    one = (high - low <= FLOAT64_ROUNDINGS * high.abs()) & low.isfinite() & high.isfinite()
    if not bool((one | empty).all()):
        return None
    return torch.where(empty, torch.nan, low)


def _scale_of_groups(scale: Tensor, shape: torch.Size, size: int) -> Tensor:
    """[N, K / size] float64 of one matrix's stored scales."""
    if scale.dtype == torch.int32:
        return scales_f64(scale, -(-shape[1] // size))
    return spread_blocks(scale.to(torch.float64), shape)[:, ::size]


def _slots_with_these_scales(case: Case, held: HeldMatrix) -> list[tuple[int, int]]:
    """Slots of the rank that have the same scales, and have them rightly."""
    scale = case.subject.stage(Stage.WEIGHTS, case.rank)[f"{case.tensor}.scale"]
    experts = case.layer.local_experts(case.rank)
    wrong = {
        one.expert
        for one in case.scene.ledger.deviations
        if (one.stage, one.rank, one.tensor) == (case.stage, case.rank, case.tensor)
    }
    return [
        (slot, experts[slot])
        for slot in range(len(scale) if held.group == "experts" else 0)
        if experts[slot] not in wrong and torch.equal(scale[slot], scale[held.slot])
    ]
