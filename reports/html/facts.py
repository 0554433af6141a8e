"""What the page picks out of a result for its first screen and its short tables."""

import math
from typing import Final

from pydantic import JsonValue

from reports.html.world import World, count, look_up
from reports.result import (
    CheckVerdict,
    Divergence,
    Finding,
    RankInfo,
    RankVerdict,
    Result,
    StageRow,
    Traffic,
    Visibility,
)

COMPARED: Final = (
    ("model", "model.preset", "model.hf_config", "model.layer"),
    ("recipe", "moe.recipe"),
    ("dispatcher", "moe.dispatcher"),
    ("rules of platform", "platform"),
    ("phase", "batch.phase"),
    ("routing", "batch.routing.kind"),
    ("input modes", "inputs.modes"),
    ("seed", "inputs.seed"),
    ("runtime", "run.runtime"),
    ("faults injected", "inject"),
    ("expected", "expect"),
)
"""Label, then the places in the scenario whose values stand behind it."""

RESOLVED: Final = ("layout", "gemm", "device")
"""Choices whose ``auto`` the result has resolved, as axes of its backends."""

SIZES: Final = (
    ("H", "hidden_size"),
    ("I", "moe_intermediate_size"),
    ("experts", "n_routed_experts"),
    ("top-k", "num_experts_per_tok"),
    ("shared", "n_shared_experts"),
)
LOST: Final = (RankVerdict.RAISED, RankVerdict.DIED, RankVerdict.HUNG)


def compared(result: Result) -> list[tuple[str, str]]:
    """(label, text) of what ran: model and sizes, topology, dispatcher, recipe, platform."""
    facts = [
        (label, _joined([look_up(result.scenario, *place.split(".")) for place in places]))
        for label, *places in COMPARED
    ]
    sizes = [f"{label} {result.model[key]}" for label, key in SIZES if key in result.model]
    resolved = [(axis, result.backends[axis].name) for axis in RESOLVED if axis in result.backends]
    facts[1:1] = [("sizes", ", ".join(sizes)), *_topology(result), *resolved]
    return [(label, text) for label, text in facts if text]


def _joined(values: list[JsonValue]) -> str:
    return ", ".join(text for text in map(_flat, values) if text)


def _flat(value: JsonValue) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return _joined(value)
    return "" if value is None else str(value)


def _topology(result: Result) -> list[tuple[str, str]]:
    world = World.of(result)
    if world is None:
        return []
    attention = ", ".join(
        f"{axis.upper()} {count(result.scenario, 'parallel', 'attention', axis)}"
        for axis in ("dp", "tp", "cp")
    )
    tokens = [("tokens", f"{sum(world.tokens)} in all")] if world.tokens else []
    return [
        ("ranks", str(world.size)),
        ("attention", attention),
        ("experts over", f"EP {world.ep_size}, TP {world.size // world.ep_size}"),
        *tokens,
    ]


def explanation(result: Result) -> Finding | None:
    """The finding that is the first divergence and says what it looks like."""
    first = result.first_divergence
    if first is None:
        return None
    return next((found for found in result.findings if _place(found) == _place(first)), None)


def _place(found: Divergence) -> tuple[object, ...]:
    where = (found.mode, found.stage, found.rank, found.token, found.slot, found.expert)
    return (*where, found.columns, found.tensor, found.check)


def error_over_band(divergence: Divergence) -> float | None:
    """|got - want| / band; None where a value is missing, not finite, or no error is allowed."""
    got, want, band = divergence.got, divergence.want, divergence.band
    if got is None or want is None or not band:
        return None
    ratio = abs(got - want) / band
    return ratio if math.isfinite(ratio) else None


def closest_call(result: Result) -> StageRow | None:
    """The stage and rank that came nearest to its limit and kept it."""
    kept = [
        row
        for row in result.stages
        if row.verdict is CheckVerdict.AGREE and row.own_worst is not None
    ]
    return max(kept, key=lambda row: row.own_worst or 0.0, default=None)


def least_sensitive(result: Result) -> Visibility | None:
    """The stage that would have flagged only the largest effects."""
    stated = [row for row in result.visibility if row.smallest_relative_effect is not None]
    return max(stated, key=lambda row: row.smallest_relative_effect or 0.0, default=None)


def lost_ranks(result: Result) -> list[RankInfo]:
    """Ranks that raised, died or hung, in this order: what failed by itself comes first."""
    return sorted(
        (rank for rank in result.ranks if rank.verdict in LOST),
        key=lambda rank: (LOST.index(rank.verdict), rank.rank),
    )


def largest_traffic(result: Result, limit: int) -> list[Traffic]:
    """The ``limit`` collectives that moved most, in the order of the pipeline."""
    rows = sorted(result.traffic, key=lambda row: -sum(row.payload_bytes))[:limit]
    return sorted(rows, key=lambda row: (row.stage.position, row.group))
