"""The ranks of a run, their tokens and their experts, as its resolved scenario describes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from pydantic import JsonValue

from moe.formats import Stage
from reports.html.wording import plural, ranges
from reports.result import Result

BEFORE: Final = (Stage.GLUE_IN, Stage.DISPATCH)
AFTER: Final = (Stage.COMBINE, Stage.TAIL, Stage.GLUE_OUT)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of collective of a stage, in all its groups."""

    stage: Stage
    op: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Attention-DP groups and EP ranks are runs of consecutive ranks.

    before, after  what the ranks exchanged on the way to the experts, and back
    """

    size: int
    attn_dp: int
    ep_size: int
    num_experts: int
    in_order: bool
    cp: int
    tokens: tuple[int, ...]
    dispatcher: str
    before: tuple[Exchange, ...]
    after: tuple[Exchange, ...]

    @classmethod
    def of(cls, result: Result) -> Self | None:
        """The world of a result, or None where its scenario does not describe one."""
        scenario = result.scenario
        size, attn_dp, ep_size = (
            count(scenario, *path)
            for path in (
                ("parallel", "world_size"),
                ("parallel", "attention", "dp"),
                ("parallel", "moe", "ep"),
            )
        )
        if not (size and attn_dp and ep_size) or size % attn_dp or size % ep_size:
            return None
        redundant = count(scenario, "moe", "redundant_experts")
        return cls(
            size=size,
            attn_dp=attn_dp,
            ep_size=ep_size,
            num_experts=count(result.model, "n_routed_experts") + redundant,
            in_order=not redundant and look_up(scenario, "moe", "placement") != "shuffled",
            cp=count(scenario, "parallel", "attention", "cp") or 1,
            tokens=_token_counts(scenario, attn_dp),
            dispatcher=str(look_up(scenario, "moe", "dispatcher") or "unknown dispatcher"),
            before=_exchanges(result, BEFORE),
            after=_exchanges(result, AFTER),
        )

    @property
    def ranks_per_dp_group(self) -> int:
        """Ranks that share one attention-DP group's tokens."""
        return self.size // self.attn_dp

    def num_tokens(self, rank: int) -> int | None:
        """Tokens of the rank's attention-DP group; None where the scenario does not say."""
        return self.tokens[rank // self.ranks_per_dp_group] if self.tokens else None

    def tokens_text(self, rank: int) -> str:
        """``17 tokens``, or ``idle``."""
        known = self.num_tokens(rank)
        if known is None:
            return ""
        share = "part of " if self.cp > 1 and known else ""
        return f"{share}{plural(known, 'token')}" if known else "idle"

    def experts_text(self, rank: int) -> str:
        """The rank's experts: by number where they are dealt out in order, else how many."""
        local, rest = divmod(self.num_experts, self.ep_size)
        if not local or rest:
            return ""
        if not self.in_order:
            return plural(local, "expert")
        shards = self.size // self.ep_size
        first = rank // shards * local
        part = f", part {rank % shards + 1}/{shards}" if shards > 1 else ""
        return (
            f"{'expert' if local == 1 else 'experts'} {ranges(range(first, first + local))}{part}"
        )


def _exchanges(result: Result, stages: Sequence[Stage]) -> tuple[Exchange, ...]:
    """What the recorded traffic of these stages was, in order, each kind once."""
    groups: dict[tuple[Stage, str], dict[tuple[int, ...], None]] = {}
    for row in result.traffic:
        if row.stage in stages:
            groups.setdefault((row.stage, row.op), {})[tuple(row.group)] = None
    return tuple(Exchange(stage, op, tuple(found)) for (stage, op), found in groups.items())


def look_up(value: JsonValue, *path: str) -> JsonValue:
    """The value at a path of keys; None where a key is missing or nothing has keys."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def count(value: JsonValue, *path: str) -> int:
    """The non-negative integer at a path of keys, else 0."""
    found = look_up(value, *path)
    return found if isinstance(found, int) and found > 0 else 0


def _token_counts(scenario: JsonValue, attn_dp: int) -> tuple[int, ...]:
    tokens = look_up(scenario, "batch", "tokens")
    if not isinstance(tokens, list) or len(tokens) != attn_dp:
        return ()
    return tuple(n if isinstance(n, int) and n > 0 else 0 for n in tokens)
