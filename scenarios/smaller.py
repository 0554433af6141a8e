"""Smaller scenarios next to one: fewer ranks, fewer tokens, smaller sizes."""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from pydantic import JsonValue

from scenarios.changes import Change, Ladder
from scenarios.loader import LoadedScenario

_SMALL: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WIDTHS: Final = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""Sizes that blocks, groups and shards divide into; the rules say which of them a recipe takes."""

_RANK: Final = re.compile(r"\brank=(\d+)")


def topologies(loaded: LoadedScenario) -> Iterator[Ladder]:
    """Every topology whose degrees of attention divide those that are there, fewest ranks first.

    Of the tokens, the first groups stay, the last, or those with most of them.
    """
    parallel = loaded.scenario.parallel
    before, view = parallel.world_size, parallel.attention
    shapes = product(_divisors(view.dp), _divisors(view.tp), _divisors(view.cp))
    yield tuple(
        _topology(loaded, shape, ep, tokens)
        for shape in sorted(shapes, key=_world)
        for ep in _experts_degrees(loaded, _world(shape))
        for tokens in _windows(loaded.scenario.batch.tokens, shape[0])
        if _world(shape) < before
    )


def _topology(
    loaded: LoadedScenario, shape: tuple[int, int, int], ep: int, tokens: Sequence[int]
) -> Change:
    dp, tp, cp = shape
    world, before = _world(shape), loaded.scenario.parallel.world_size
    split = loaded.scenario.parallel.attention.cp_split
    attention: dict[str, JsonValue] = {"dp": dp, "tp": tp, "cp": cp, "cp_split": split}
    moe: dict[str, JsonValue] = {"ep": ep, "tp": world // ep}
    words = f"ranks {before} -> {world} (dp {dp}, tp {tp}, cp {cp}, ep {ep})"
    return Change(
        what=f"{words}, tokens {_list(loaded.scenario.batch.tokens)} -> {_list(tokens)}",
        sets={
            "parallel": {"world_size": world, "attention": attention, "moe": moe},
            "batch.tokens": [*tokens],
            "inject": [on_some_rank(text, world) for text in loaded.scenario.inject],
        },
    )


def on_some_rank(inject: str, world: int) -> str:
    """A fault as injected, on a rank that the fault picks where the one it names has gone."""
    return _RANK.sub(lambda named: _rank(int(named[1]), world), inject)


def _rank(rank: int, world: int) -> str:
    return f"rank={rank}" if rank < world else "rank=auto"


def _experts_degrees(loaded: LoadedScenario, world: int) -> list[int]:
    """Degrees of expert parallelism, those first that share experts and split them as before."""
    tp = loaded.scenario.parallel.moe.tp
    return sorted(_divisors(world), key=lambda ep: (world // ep > tp, world // ep < tp, -ep))


def _windows(tokens: Sequence[int], groups: int) -> list[Sequence[int]]:
    """Groups next to each other: with most tokens, the first, the last; each list once."""
    starts = range(0, len(tokens) - groups + 1)
    most = max(starts, key=lambda start: (sum(map(bool, tokens[start : start + groups])), -start))
    chosen = (most, 0, len(tokens) - groups)
    return [*dict.fromkeys(tuple(tokens[start : start + groups]) for start in chosen)]


def fewer_tokens(loaded: LoadedScenario) -> Iterator[Ladder]:
    """All groups cut to a few tokens; then each group by itself."""
    tokens = loaded.scenario.batch.tokens
    yield tuple(
        _tokens(tokens, [min(count, most) for count in tokens])
        for most in _below(max(tokens), _SMALL)
    )
    for group, count in enumerate(tokens):
        fewer = dict.fromkeys([0, *_below(count, _SMALL), *([count - 1] if count else [])])
        yield tuple(
            _tokens(tokens, [*tokens[:group], one, *tokens[group + 1 :]])
            for one in fewer
            if one < count
        )


def _tokens(before: Sequence[int], tokens: Sequence[int]) -> Change:
    return Change(
        what=f"tokens {_list(before)} -> {_list(tokens)}", sets={"batch.tokens": [*tokens]}
    )


def _list(counts: Sequence[int]) -> str:
    """As YAML has it; of many counts their number and sum."""
    few = len(counts) <= 8
    return str([*counts]).replace(" ", "") if few else f"{sum(counts)} of {len(counts)} groups"


def sizes(loaded: LoadedScenario) -> Iterator[Ladder]:
    """One ladder a size of the layer."""
    model = loaded.model
    yield _size("num_experts_per_tok", model.num_experts_per_tok, _SMALL)
    yield _size("n_routed_experts", model.n_routed_experts, _SMALL)
    yield _size("moe_intermediate_size", model.moe_intermediate_size, _WIDTHS)
    if model.outer_hidden_size is None:
        yield _size("hidden_size", model.hidden_size, _WIDTHS)
    else:
        names = ("routed_expert_hidden_size", "hidden_size")
        yield _size(names[0], model.hidden_size, _WIDTHS, also=names[1:])
    if model.shared_intermediate_size != model.n_shared_experts * model.moe_intermediate_size:
        yield _size("shared_intermediate_size", model.shared_intermediate_size, _WIDTHS)
    if model.n_shared_experts > 1:
        yield _size("n_shared_experts", model.n_shared_experts, _SMALL)
    if loaded.scenario.model.layer == "hash_moe":
        yield _size("vocab_size", model.vocab_size, _WIDTHS)


def _size(name: str, before: int, steps: Sequence[int], also: Sequence[str] = ()) -> Ladder:
    """A key of config.json at each smaller step, the smallest first."""
    return tuple(
        Change(
            what=f"{name} {before} -> {step}",
            sets={f"model.overrides.{key}": step for key in (name, *also)},
        )
        for step in _below(before, steps)
    )


def _below(limit: int, steps: Sequence[int]) -> list[int]:
    return [step for step in steps if step < limit]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _world(shape: tuple[int, int, int]) -> int:
    dp, tp, cp = shape
    return dp * tp * cp
