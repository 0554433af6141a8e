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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Which experts each token goes to, and what decided it.

    ids      [T, K] int64    global experts, slots in descending order of rank value
    weights  [T, K] float64  without the correction bias and the routed scaling factor
    ranked   [T, E] float64  score + bias; a NaN is -1e30, so it ranks last
    """

    ids: Tensor
    weights: Tensor
    ranked: Tensor


def linear(x: Tensor, weight: Tensor) -> Terms:
    """Product x @ weight.T: [R, K] float64 and [N, K] float64 to [R, N]."""
    return Terms(value=x @ weight.T, magnitude=x.abs() @ weight.abs().T)


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logits)), elementwise in float64; NaN stays NaN.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK, scoring function sqrtsoftplus.
    """
    softplus = logits.clamp(min=0.0) + torch.log1p(torch.exp(-logits.abs()))
    return softplus.sqrt()


def select_experts(logits: Tensor, bias: Tensor | None, top_k: int, renormalize: bool) -> Routes:
    """Choose each token's experts by score + bias, weigh them by score.

    Ties go to the lowest expert id.

    Args:
        logits: [T, E] float64.
        bias: [E] float64 correction, or None.
        top_k: experts a token, at most E.
        renormalize: divide the weights by their sum where that is positive.

    Raises:
        ValueError: top_k exceeds the number of experts.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK.
    """
    if top_k > logits.shape[1]:
        raise ValueError(
            f"top_k ({top_k}) must not exceed the number of experts ({logits.shape[1]})"
        )
    scores = router_scores(logits)
    ranked = scores if bias is None else scores + bias
    ranked = ranked.masked_fill(ranked.isnan(), -1e30)
    ids = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return Routes(ids=ids, weights=route_weights(scores, ids, renormalize), ranked=ranked)


def route_weights(scores: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    """Weights of given routes: [T, E] float64 scores at [T, K] int64 ids; 0 for a dropped -1."""
    weights = scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    if not renormalize:
        return weights
    total = weights.sum(dim=1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def gated_silu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up, both clamped first where the model has a limit.

    The clamp is the hardware's minimum and maximum, which return the operand that is not NaN:
    with a limit L a NaN gate counts as L and a NaN up as -L.

    Args:
        gate_up: [R, 2I] float64, gate columns first.
        limit: L; gate at most L, up within +-L. None: no clamp.

    Returns:
        [R, I] float64.

    Source: SGLang 0.5.21, kernels/jit/csrc/deepseek_v4/silu_and_mul_masked_post_quant.cuh.
    """
    gate, up = gate_up.chunk(2, dim=1)
    if limit is not None:
        gate = gate.clamp(max=limit).masked_fill_(gate.isnan(), limit)
        up = up.clamp(-limit, limit).masked_fill_(up.isnan(), -limit)
    return gate / (1.0 + torch.exp(-gate)) * up


def weighted_sum(rows: Tensor, weights: Tensor) -> Terms:
    """Sum of a token's expert rows by weight: [T, K, H] and [T, K], both float64, to [T, H].

    A route that is absent is given as a row of zeros.
    """
    return Terms(
        value=torch.einsum("tk,tkh->th", weights, rows),
        magnitude=torch.einsum("tk,tkh->th", weights.abs(), rows.abs()),
    )


def ordered_sum(partials: Tensor) -> Terms:
    """Sum over the leading axis: [P, T, H] float64 to [T, H]."""
    return Terms(value=partials.sum(dim=0), magnitude=partials.abs().sum(dim=0))


def tail(routed: Tensor, shared: Tensor | None, routed_scaling_factor: float) -> Terms:
    """Sum shared + routed_scaling_factor * routed: [T, H] float64 each."""
    scaled = routed_scaling_factor * routed
    if shared is None:
        return Terms(value=scaled, magnitude=scaled.abs())
    return Terms(value=shared + scaled, magnitude=shared.abs() + scaled.abs())
