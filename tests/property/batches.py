"""Drawn batches: which experts the tokens of one to six ranks go to, and those that break most."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

Token = tuple[int, ...]
"""Experts of one token by slot, -1 = dropped."""


@dataclass(frozen=True)
class Batch:
    """Tokens by rank; ranks own equal contiguous blocks of experts."""

    num_experts: int
    top_k: int
    tokens: tuple[tuple[Token, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(map(len, self.tokens))

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        """Rank after rank: a token's number is its place here."""
        return tuple(token for rank in self.tokens for token in rank)

    def local_slots(self, token: Token, rank: int) -> list[int]:
        """The token's experts on a rank, as the rank counts them."""
        first = rank * self.num_local
        return [expert - first for expert in token if first <= expert < first + self.num_local]

    def on_one_rank(self) -> "Batch":
        """The same tokens in the same order, all experts beside them."""
        return Batch(self.num_experts, self.top_k, (self.all_tokens,))


def _distinct(drawn: list[int], num_experts: int) -> Token:
    """An expert that a slot before has taken gives way to the next free one; -1 stays."""
    token: list[int] = []
    for expert in drawn:
        while expert >= 0 and expert in token:
            expert = (expert + 1) % num_experts
        token.append(expert)
    return tuple(token)


@st.composite
def batches(draw: st.DrawFn, *, max_ranks: int = 6, top_ks: Sequence[int] = (1, 2, 3)) -> Batch:
    num_ranks, num_local = draw(st.integers(1, max_ranks)), draw(st.integers(1, 3))
    num_experts = num_ranks * num_local
    top_k = draw(st.sampled_from([k for k in top_ks if k <= num_experts]))
    slot = st.integers(-1, num_experts - 1)
    token = st.lists(slot, min_size=top_k, max_size=top_k).map(
        lambda drawn: _distinct(drawn, num_experts)
    )
    tokens = st.lists(token, max_size=4).map(tuple)
    return Batch(num_experts, top_k, tuple(draw(tokens) for _ in range(num_ranks)))


NOBODY_HAS_A_TOKEN = Batch(4, 2, ((), ()))
ALL_DROPPED = Batch(2, 1, (((-1,), (-1,)), ((-1,),)))
ONE_HOT_EXPERT = Batch(6, 1, (((5,),) * 4, (), ((5,),) * 3))


def some_batches(test: Callable[..., None]) -> Callable[..., None]:
    """Run a law on drawn batches and on those that break most often."""
    for batch in (NOBODY_HAS_A_TOKEN, ALL_DROPPED, ONE_HOT_EXPERT):
        test = example(batch)(test)
    return settings(max_examples=20)(given(batches())(test))


def counted(*counts: int, num_local: int | None = None) -> Batch:
    """One rank whose expert i has ``counts[i]`` routes, one a token; further experts have none."""
    tokens = [(expert,) for expert, count in enumerate(counts) for _ in range(count)]
    return Batch(num_local or len(counts), 1, (tuple(tokens),))


def spread(num_tokens: int, top_k: int, num_experts: int) -> Batch:
    """One rank whose tokens take the experts in turn."""
    tokens = (
        tuple((token * top_k + slot) % num_experts for slot in range(top_k))
        for token in range(num_tokens)
    )
    return Batch(num_experts, top_k, (tuple(tokens),))


EDGES: dict[str, Batch] = {
    "no token": NOBODY_HAS_A_TOKEN,
    "all dropped": ALL_DROPPED,
    "one hot expert": ONE_HOT_EXPERT,
    "idle rank": Batch(3, 2, (((0, 2), (1, -1)), (), ((-1, 2),))),
    "first expert empty": counted(0, 3, 2),
    "middle expert empty": counted(2, 0, 3),
    "last expert empty": counted(3, 2, 0),
    "last rank empty": Batch(4, 2, (((0, 1),) * 2, ((1, -1),))),
    **{f"{count} routes of an expert": counted(1, count, 0) for count in (127, 128, 129)},
    **{f"{count} routes of the last": counted(0, 1, count) for count in (255, 256, 257)},
    "93 slots, 11 experts": spread(93, 1, 11),
    "128 slots, 8 experts": spread(64, 2, 8),
    "41 slots, 25 experts": spread(41, 1, 25),
    **{f"{count} slots": spread(count, 1, 3) for count in (1023, 1024, 1025)},
    "more experts than slots": spread(1, 2, 1024),
}
"""Counts around the sizes of blocks, slabs and launches; slots times experts around 1,024."""
