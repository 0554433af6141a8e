"""Made routings: pinned routes, and router weights and tokens that force special logits.

Everything is a function of the seed and the global token; no rank enters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.random_tensors import integers, permutation, seeded, uniform
from scenarios.errors import InputError, not_one_of

HOT_TOKENS_OF_TEN = 9
"""Of ten tokens in a row, so many go to the hot expert."""

SIGMAS_BELOW_ZERO = 8.0
"""Logits of unit-normal tokens exceed this many row norms with probability 6e-16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """What the routes are drawn for: K distinct experts for each of T tokens."""

    kind: str
    seed: int
    tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int

    def keys(self, what: str) -> Tensor:
        """[T, E] float64 in [0, 1), drawn token after token."""
        generator = seeded(self.seed, "routing", self.kind, what)
        return uniform(generator, self.tokens, self.num_experts, dtype=torch.float64)

    def one_of(self, count: int, what: str) -> int:
        """A number below ``count``."""
        generator = seeded(self.seed, "routing", self.kind, what)
        return int(integers(generator, 0, count, 1))

    def permutation(self) -> Tensor:
        """[E] int64, all experts in a drawn order."""
        generator = seeded(self.seed, "routing", self.kind, "order")
        return permutation(generator, self.num_experts)

    def need(self, available: int, what: str) -> None:
        """Raise InputError where a token cannot have K distinct experts."""
        if self.top_k > available:
            raise InputError(
                f"routing {self.kind} gives each token {self.top_k} distinct experts of "
                f"{what}, and there are {available}"
            )


def made_routes(
    kind: str, *, seed: int, tokens: int, top_k: int, num_experts: int, num_local_experts: int
) -> tuple[Tensor, Tensor]:
    """Routes of the global token list, whatever the logits.

    balanced    every expert gets as many routes as any other, or one less
    zipf        expert popularity falls with 1 / rank
    hot_expert  nine tokens of ten have one expert in common
    one_rank    all routes go to one block of ``num_local_experts`` consecutive experts
    dropped     every fourth token has lost its first slot, every fourth all its slots, and one
                expert every route; dropped slots keep a weight, which nothing may read

    Args:
        kind: one of ``MADE_ROUTES``.
        seed: the scenario's.
        tokens: T, over all ranks.
        top_k: K.
        num_experts: E.
        num_local_experts: experts of one rank, for one_rank.

    Returns:
        ids [T, K] int32, distinct within a token, -1 = dropped; weights [T, K] fp32, positive,
        each token's sum 1.

    Raises:
        InputError: too few experts for K distinct ones.
        ValueError: another kind.
    """
    if kind not in MADE_ROUTES:
        raise ValueError(f"routing kind: {not_one_of(kind, MADE_ROUTES)}")
    draw = _Draw(
        kind=kind,
        seed=seed,
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_local_experts=num_local_experts,
    )
    draw.need(num_experts, "all experts")
    ids = MADE_ROUTES[kind](draw).to(torch.int32)
    shares = 0.5 + draw.keys("weights")[:, :top_k]
    return ids, (shares / shares.sum(dim=1, keepdim=True)).to(torch.float32)


def _balanced(draw: _Draw) -> Tensor:
    route = torch.arange(draw.tokens * draw.top_k).view(draw.tokens, draw.top_k)
    return draw.permutation()[route % draw.num_experts]


def _zipf(draw: _Draw) -> Tensor:
    """K draws without replacement: the first K arrivals when an expert arrives at rate 1 / rank."""
    rank = 1 + draw.permutation()
    return _lowest(-torch.log1p(-draw.keys("arrival")) * rank, draw.top_k)


def _hot_expert(draw: _Draw) -> Tensor:
    draw.need(draw.num_experts - 1, "all experts but the hot one")
    keys = draw.keys("others")
    token = torch.arange(draw.tokens)
    is_hot = token % 10 < HOT_TOKENS_OF_TEN
    keys[:, draw.one_of(draw.num_experts, "hot")] = torch.where(is_hot, -1.0, 2.0)
    turned = (token[:, None] + torch.arange(draw.top_k)) % draw.top_k
    return _lowest(keys, draw.top_k).gather(1, turned)


def _one_rank(draw: _Draw) -> Tensor:
    draw.need(draw.num_local_experts, "one rank")
    block = draw.one_of(draw.num_experts // draw.num_local_experts, "rank")
    first = block * draw.num_local_experts
    own = draw.keys("experts")[:, first : first + draw.num_local_experts]
    return first + _lowest(own, draw.top_k)


def _dropped(draw: _Draw) -> Tensor:
    ids = _lowest(draw.keys("experts"), draw.top_k)
    dropped = ids == draw.one_of(draw.num_experts, "dropped")
    dropped[0::4, 0] = True
    dropped[2::4] = True
    return ids.masked_fill(dropped, -1)


def _lowest(keys: Tensor, count: int) -> Tensor:
    """Columns of the ``count`` lowest keys of each row, lowest first."""
    return keys.argsort(dim=1, stable=True)[:, :count]


MADE_ROUTES: Final[Mapping[str, Callable[[_Draw], Tensor]]] = MappingProxyType(
    {
        "balanced": _balanced,
        "zipf": _zipf,
        "hot_expert": _hot_expert,
        "one_rank": _one_rank,
        "dropped": _dropped,
    }
)
"""Kinds whose routes are pinned."""

MADE_LOGITS: Final = ("ties", "all_negative")
"""Kinds whose router is free and sees special logits."""


def made_gate(kind: str, gate_weight: Tensor) -> Tensor:
    """Gate weights that force the logits of a kind; the logits stay gate(x).

    ties          experts 0-1, 2-4, 5-6, 7-9, ... share a row, hence their logits
    all_negative  column 0 of every row is minus eight times the longest row; it meets the constant
                  1 that ``made_hidden_states`` puts into the tokens

    Args:
        kind: any routing kind; those that are not in ``MADE_LOGITS`` change nothing.
        gate_weight: [E, H], any float dtype.

    Returns:
        [E, H] in the dtype of ``gate_weight``.
    """
    if kind == "ties":
        return gate_weight[_first_of_tied(gate_weight.shape[0])]
    if kind == "all_negative":
        made = gate_weight.clone()
        made[:, 0] = -SIGMAS_BELOW_ZERO * gate_weight.to(torch.float64).norm(dim=1).max()
        return made
    return gate_weight


def made_bias(kind: str, correction_bias: Tensor | None) -> Tensor | None:
    """[E] correction bias to go with ``made_gate``; None where there is none.

    ties          tied experts share their bias, so their ranks tie as well
    all_negative  lowered until every score + bias of a score below 1 is negative
    """
    if correction_bias is None:
        return None
    if kind == "ties":
        return correction_bias[_first_of_tied(correction_bias.shape[0])]
    if kind == "all_negative":
        return correction_bias - correction_bias.max() - 1.0
    return correction_bias


def made_hidden_states(kind: str, hidden_states: Tensor) -> Tensor:
    """[T, H] tokens to go with ``made_gate``: column 0 is 1 for all_negative."""
    if kind != "all_negative":
        return hidden_states
    made = hidden_states.clone()
    made[:, 0] = 1.0
    return made


def _first_of_tied(num_experts: int) -> Tensor:
    """[E] int64: of each expert's run of tied ones, two and three long in turn, the first.

    Two lengths, so that whatever K is, some tokens' cut falls inside a run.
    """
    expert = torch.arange(num_experts)
    return expert - torch.tensor([0, 1, 0, 1, 2])[expert % 5]
