"""A value that should be a sum of known terms: which coefficients it really has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF
from reports.verdict.band import fp32_noise, stored_bf16


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

        The sum, or the due one that a mistake was added to, may have been stored as bf16 once more
        on its way. A row that the due sum explains as well within that is not explained by another.

        Args:
            coefficients: [n, W].
        """
        value = torch.einsum("nw,nwc->wc", coefficients, self.terms)
        due = torch.einsum("nw,nwc->wc", self.due, self.terms)
        larger = torch.maximum(coefficients.abs(), self.due.abs())
        size = torch.einsum("nw,nwc->wc", larger, self.terms.abs())
        noise = fp32_noise(size, len(self.names) + 2) + BF16_ROUNDOFF * size
        band = stored_bf16(value, noise)
        fits = ((self.got - value).abs() <= band).all(1)
        return fits & ((self.got - due).abs() > band).any(1)

    def constant(self, coefficients: Sequence[float]) -> Tensor:
        """[n, W] the same coefficients, in multiples of what is due, in every row."""
        return torch.tensor(coefficients, dtype=torch.float64)[:, None] * self.due

    def mean_fit(self, term: int, explained: Tensor) -> float:
        """The fitted coefficient of one term, over rows where it has a value."""
        rows = explained & ~self.is_zero[term]
        return float(self.fitted()[term][rows].mean()) if bool(rows.any()) else torch.nan
