"""Scales that deviate beside those that are due, whatever comparison found them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reports.verdict.decode import num_words
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import Table
from reports.verdict.diagnosis.luck import bits_of_cells
from reports.verdict.diagnosis.tables import tables_of
from reports.verdict.diagnosis.words import scales_of
from reports.verdict.rows import Rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScaleSides:
    """W rows of G scales.

    rows       coordinates
    got, due   [W, G] float64
    right      [V, G] scales of the rank's other rows, which are as they are due: a law of the whole
               tensor has to leave them so
    is_packed  exponents, four to a word; else fp32
    num_words  words that hold a row's exponents
    unit       [W] int64: rows with the same number have one scale in common; None: each its own
    source     [W + V, G] float64 largest magnitude of each group of both, where that is known
    donors     rows of scales that may stand here by mistake
    """

    rows: Rows
    got: Tensor
    due: Tensor
    right: Tensor
    is_packed: bool
    num_words: int
    unit: Tensor | None = None
    source: Tensor | None = None
    donors: tuple[Table, ...] = ()

    @property
    def wrong(self) -> Tensor:
        """[W, G] bool."""
        return ~((self.got == self.due) | (self.got.isnan() & self.due.isnan()))

    @property
    def all_due(self) -> Tensor:
        """[W + V, G] what is due in the wrong and in the right rows."""
        return torch.cat([self.due, self.right])

    def bits_of(self, explained: Tensor, known: int = 0) -> float:
        """What hitting the wrong scales of some rows [W] bool by luck takes: see ``bits_of_cells``.

        Rows with a scale in common prove it once; ``known`` scales prove nothing.
        """
        wrong = self.wrong & explained[:, None]
        hit = self.got[wrong]
        if self.unit is not None:
            blocks = torch.arange(wrong.shape[1])
            scale = (self.unit[:, None] * len(blocks) + blocks)[wrong].sort(stable=True)
            is_first = scale.values.diff(prepend=scale.values.new_full((1,), -1)) != 0
            hit = hit[scale.indices[is_first]]
        all_due = self.all_due
        bits = bits_of_cells(hit, all_due, self._slack * all_due.abs())
        return bits * max(len(hit) - known, 0) / max(len(hit), 1)

    @property
    def _slack(self) -> float:
        """fp32 scales may be a last place off."""
        return 0.0 if self.is_packed else torch.finfo(torch.float32).eps

    def explains(self, value: Tensor) -> Tensor:
        """[W] bool: rows that a law of single rows gives in every group."""
        return self._equal(self.got, value)

    def explains_all(self, value: Tensor) -> Tensor:
        """[W] bool: the same of a law of the whole tensor, [W + V, G]: no right row contradicts."""
        if not bool(self._equal(self.right, value[len(self.got) :]).all()):
            return torch.zeros(len(self.got), dtype=torch.bool)
        return self._equal(self.got, value[: len(self.got)])

    def _equal(self, got: Tensor, value: Tensor) -> Tensor:
        """[N] bool: rows that are equal."""
        fits = ((got - value).abs() <= self._slack * value.abs()) | (got == value)
        return (fits | (got.isnan() & value.isnan())).all(1)


def scale_sides(case: Case) -> ScaleSides | None:
    """The sides of a case of scales; None for another."""
    if not case.is_scale or case.got.shape[1] == 0:
        return None
    traced = case.traced
    is_packed = traced is not None and traced.dtype == torch.int32
    quantiser = case.evidence.quantiser
    if quantiser is None:
        groups = case.num_groups or case.got.shape[1]
        got, due = (_scales(values, groups, is_packed) for values in (case.got, case.want))
        if got.shape != due.shape:
            return None  # another number of scales is another form, and a broken contract
        return _sides(case, got, due, _tables(case, groups, is_packed), is_packed=is_packed)
    in_order = torch.cat([case.here, case.right])
    amax = _group_amax(quantiser.want.scaled, quantiser.want.scale)[in_order]
    groups = case.got.shape[1]
    elsewhere = Table(values=case.evidence.want, rows=case.evidence.rows)
    tables = [elsewhere, *_tables(case, groups, is_packed)[1:]]
    return _sides(case, case.got, case.want, tables, is_packed=is_packed, source=amax)


def _sides(
    case: Case,
    got: Tensor,
    due: Tensor,
    tables: list[Table],
    *,
    is_packed: bool,
    source: Tensor | None = None,
) -> ScaleSides:
    return ScaleSides(
        rows=case.rows,
        got=got,
        due=due,
        right=_scales(case.evidence.want[case.right], got.shape[1], is_packed and source is None),
        is_packed=is_packed,
        num_words=num_words(got.shape[1]),
        source=source,
        donors=tuple(tables),
    )


def _tables(case: Case, groups: int, is_packed: bool) -> list[Table]:
    """Rows of scales that may stand in a wrong one's place."""
    return [
        Table(values=_scales(table.values, groups, is_packed), rows=table.rows)
        for table in tables_of(case)
    ]


def _scales(values: Tensor, groups: int, is_packed: bool) -> Tensor:
    """[N, groups] scales of words or fp32 numbers that were compared as float64."""
    if not is_packed:
        return values
    return scales_of(values.to(torch.int64), groups)


def _group_amax(scaled: Tensor, scale: Tensor) -> Tensor:
    """[R, G] largest magnitude of each group of what was quantised."""
    grouped = scaled.view(*scale.shape, scaled.shape[-1] // scale.shape[-1])
    return grouped.abs().nan_to_num(0.0).amax(-1) * scale
