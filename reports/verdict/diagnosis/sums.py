"""A value that should be a sum of known terms: which coefficients it really has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF
from reports.verdict.band import fp32_noise, stored_bf16
from reports.verdict.diagnosis.case import Case


def shown(coefficient: float) -> str:
    """A fitted coefficient as far as bf16 values determine it."""
    return f"{round(coefficient, 3) + 0.0:g}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TermSum:
    """W rows that should be sums of n terms.

    names  of the terms
    terms  [n, W, C] float64
    due    [n, W] float64 coefficients that are due
    got    [W, C] float64
    """

    names: Sequence[str]
    terms: Tensor
    due: Tensor
    got: Tensor

    def fitted(self) -> Tensor:
        """[n, W] coefficients by least squares, row by row; a term that is zero keeps its due one.

        A row with a value that is no number has no fit: NaN.
        """
        gram = torch.einsum("nwc,mwc->wnm", self.terms, self.terms)
        right = torch.einsum("nwc,wc->wn", self.terms, self.got)
        is_fit = gram.flatten(1).isfinite().all(1) & right.isfinite().all(1)
        found = torch.full_like(self.due, torch.nan)
        if bool(is_fit.any()):
            inverse = torch.linalg.pinv(gram[is_fit], hermitian=True)
            found[:, is_fit] = torch.einsum("wnm,wm->nw", inverse, right[is_fit])
        return torch.where(self.is_zero, self.due, found)

    @property
    def is_zero(self) -> Tensor:
        """[n, W] bool terms without a value."""
        return (self.terms == 0).all(2)

    def explains(self, coefficients: Tensor) -> Tensor:
        """[W] bool: rows whose every value is the sum with these coefficients, and not the due one.

        A row that the due sum explains as well within the band is not explained by another.

        Args:
            coefficients: [n, W].
        """
        due = torch.einsum("nw,nwc->wc", self.due, self.terms)
        is_other = ((self.got - due).abs() > self._band(coefficients)).any(1)
        return self.fits(coefficients) & is_other

    def fits(self, coefficients: Tensor) -> Tensor:
        """[W] bool: rows whose every value is the sum with these coefficients, whatever is due."""
        value = torch.einsum("nw,nwc->wc", coefficients, self.terms)
        is_near = (self.got - value).abs() <= self._band(coefficients)
        return (is_near | (self.got.isnan() & value.isnan())).all(1)

    def _band(self, coefficients: Tensor) -> Tensor:
        """[W, C] error of the sum.

        It, or the due one that a mistake was added to, may have been stored as bf16 once more.
        """
        value = torch.einsum("nw,nwc->wc", coefficients, self.terms)
        larger = torch.maximum(coefficients.abs(), self.due.abs())
        size = torch.einsum("nw,nwc->wc", larger, self.terms.abs())
        noise = fp32_noise(size, len(self.names) + 2) + BF16_ROUNDOFF * size
        return stored_bf16(value, noise)

    def bits_of(self, coefficients: Tensor, explained: Tensor) -> float:
        """What hitting these coefficients by luck takes, however many values follow from one.

        For terms that something multiplies, which may be any number.

        A coefficient that is another than the due one may lie anywhere up to the larger of both;
        its chance is the part of that which the band around the named one takes, in the sharpest
        cell.

        Args:
            coefficients: [n, W].
            explained: bool, of the first rows those that count.
        """
        counts = torch.zeros(self.due.shape[1], dtype=torch.bool)
        counts[: len(explained)] = explained
        width = self._band(coefficients) / self.terms.abs()
        sharpest = width.nan_to_num(torch.inf).amin(2) * 2
        largest = torch.maximum(coefficients.abs(), self.due.abs())
        luck = (sharpest / largest).clamp(max=1.0).nan_to_num(1.0)
        is_told = (coefficients != self.due) & ~self.is_zero & counts
        return float(-luck[is_told].log2().sum())

    def constant(self, coefficients: Sequence[float]) -> Tensor:
        """[n, W] the same coefficients, in multiples of what is due, in every row."""
        return torch.tensor(coefficients, dtype=torch.float64)[:, None] * self.due

    def mean_fit(self, term: int, explained: Tensor) -> float:
        """The fitted coefficient of one term, over those of the first rows where it has a value."""
        count = len(explained)
        rows = explained & ~self.is_zero[term, :count]
        return float(self.fitted()[term, :count][rows].mean()) if bool(rows.any()) else torch.nan


def law_of_rank(case: Case, sums: TermSum, coefficients: Tensor) -> Tensor:
    """[W] bool: wrong rows that have coefficients [n, W + V], if every right row has them, too.

    Args:
        case: of W wrong rows.
        sums: of ``case.whole``.
        coefficients: of all its rows.
    """
    explains = sums.explains(coefficients)
    return case.lawful(sums.fits(coefficients)) & explains[: len(case.here)]
