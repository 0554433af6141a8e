"""The arithmetic of each stage in float64, with the sum of |terms| that error bands scale with."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Sums, and how large their terms were.

    value      [...] float64  each cell's sum
    magnitude  [...] float64  the sum of |terms| of the same cell
    """

    value: Tensor
    magnitude: Tensor


def linear(x: Tensor, weight: Tensor) -> Terms:
    """Product x @ weight.T: [R, K] float64 and [N, K] float64 to [R, N]."""
    return Terms(value=x @ weight.T, magnitude=x.abs() @ weight.abs().T)


def weighted_sum(rows: Tensor, weights: Tensor) -> Terms:
    """Sum of a token's expert rows by weight: [T, K, H] and [T, K], both float64, to [T, H].

    A route that is absent is given as a row of zeros.
    """
    return Terms(
        value=torch.einsum("tk,tkh->th", weights, rows),
        magnitude=torch.einsum("tk,tkh->th", weights.abs(), rows.abs()),
    )


def tail(routed: Tensor, shared: Tensor | None, routed_scaling_factor: float) -> Terms:
    """Sum shared + routed_scaling_factor * routed: [T, H] float64 each."""
    scaled = routed_scaling_factor * routed
    if shared is None:
        return Terms(value=scaled, magnitude=scaled.abs())
    return Terms(value=shared + scaled, magnitude=shared.abs() + scaled.abs())
