"""The ranks of a run, their tokens and their experts, as its resolved scenario describes them."""

from dataclasses import dataclass
from typing import Self

from pydantic import JsonValue

from reports.html.wording import plural, ranges
from reports.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Attention-DP groups and EP ranks are runs of consecutive ranks."""

    size: int
    attn_dp: int
    ep_size: int
    num_experts: int
    in_order: bool
    tokens: tuple[int, ...]
    dispatcher: str

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
            tokens=_token_counts(scenario, attn_dp),
            dispatcher=str(look_up(scenario, "moe", "dispatcher") or "unknown dispatcher"),
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
        return "" if known is None else plural(known, "token") if known else "idle"

    def experts_text(self, rank: int) -> str:
        """The rank's experts: by number where they are dealt out in order, else how many."""
        local, rest = divmod(self.num_experts, self.ep_size)
        if not local or rest:
            return ""
        if not self.in_order:
            return plural(local, "expert")
        first = rank // (self.size // self.ep_size) * local
        return f"{'expert' if local == 1 else 'experts'} {ranges(range(first, first + local))}"


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
