"""Weights of exact mode: rows of one or two terms, powers of two, so that sums are exact.

What gate and up read is chosen so that the activation is a small multiple of a power of two,
however its kernel rounds: an open gate saturates, or is so large that silu is the identity.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import frexp
from typing import Final

import torch
from torch import Tensor

from moe.formats import ActivationKind, GatedActivation, ScaleFormat
from moe.random_tensors import integers, seeded, uniform
from scenarios.exact_tokens import ANCHOR, BLOCK
from scenarios.synthetic_weights import KEPT_ELEMENTS, SyntheticWeights

SATURATING: Final = 256.0
"""Weight of a gate that a clamp or a tanh bounds, and of one that is closed for certain."""

CLOSED_SHARE: Final = 0.05
ORDINARY_SHARE: Final = 0.15
"""Of gates that read any value of the token: open, closed or zero by its sign."""

IDENTITY: Final = 8.0
"""A gate that silu leaves as it is, up to less than half a place of bf16. Beside an ``up`` at its
clamp it makes 80 = 5 * 16; with both at a clamp of 10 it were 100 = 25 * 4, whose two bits more are
those that a rank's stored sum does not have."""

SECOND_TERM_SHARE: Final = 0.15
CLAMPED_SHARE: Final = 0.25
ROUTED_DOWN: Final = 0.25
SHARED_DOWN: Final = 1 / 16
"""Smaller: it meets a sum of routes that their weights have made small."""

FP4_GROUP: Final = 32


class Pattern(StrEnum):
    """What an expert exercises beside the usual."""

    BASE = "base"
    UP_CLAMP = "clamp on up"
    CROSSING = "sums across blocks"


def pattern_of(expert_id: int) -> Pattern:
    """By the logical expert: one of four adds up across blocks, one of sixteen clamps up."""
    if expert_id % 16 == 3:
        return Pattern.UP_CLAMP
    return Pattern.CROSSING if expert_id % 4 == 1 else Pattern.BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactWeights(SyntheticWeights):
    """``SyntheticWeights`` of other numbers; one draw a (seed, tensor, expert) as there.

    activation    decides what a gate has to read
    scale_format  of the activation behind it: the edges of power-of-two scales are kept clear of
    """

    activation: GatedActivation
    scale_format: ScaleFormat

    def gate_matrix(self) -> Tensor:
        """[E, H] bf16: anchors count as any other column, or all tokens would go one way."""
        gate = SyntheticWeights.gate_matrix(self) * 0.5
        gate[:, ::BLOCK] /= ANCHOR
        return gate

    def gated_mlp(self, name: str, width: int, expert_id: int) -> tuple[Tensor, Tensor]:
        """(w13 [2W, H], w2 [H, W]) bf16 of one expert."""
        is_shared = name != "expert"
        draw = _Draw(
            seed=self.seed,
            name=name,
            index=expert_id,
            hidden_size=self.hidden_size,
            width=width,
            pattern=Pattern.BASE if is_shared else pattern_of(expert_id),
            rule=self.activation,
            avoids_edge=self._avoids_edge,
            down=SHARED_DOWN if is_shared else self._routed_down(expert_id),
        )
        small = 3 * width * self.hidden_size <= KEPT_ELEMENTS
        drawn = _kept_mlp if small else _drawn_mlp
        return drawn(draw, torch.get_default_device())

    def _routed_down(self, expert_id: int) -> float:
        """Smaller where ``up`` at its clamp makes large numbers of few bits."""
        has_few_bits = self.scale_format is ScaleFormat.UE8M0 or _reaches_identity(self.activation)
        is_large = has_few_bits and pattern_of(expert_id) is Pattern.UP_CLAMP
        return ROUTED_DOWN / 4 if is_large else ROUTED_DOWN

    @property
    def _avoids_edge(self) -> bool:
        """Whether a gate at its limit would end on the edge between two power-of-two scales.

        448 is 7 times a power of two, so a group's largest magnitude must not be.
        """
        limit = self.activation.limit
        is_seven = limit is not None and frexp(limit)[0] == 0.875
        return is_seven and self.scale_format is ScaleFormat.UE8M0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """What one gated MLP is drawn for."""

    seed: int
    name: str
    index: int
    hidden_size: int
    width: int
    pattern: Pattern
    rule: GatedActivation
    avoids_edge: bool
    down: float

    def generator(self, what: str) -> torch.Generator:
        return seeded(self.seed, f"exact.{self.name}.{what}", self.index)

    @property
    def is_oai(self) -> bool:
        return self.rule.kind is ActivationKind.OAI_SWIGLU

    @property
    def saturates(self) -> bool:
        """Whether an open gate is bounded: by a clamp, or by a tanh."""
        return self.rule.limit is not None or self.rule.kind is ActivationKind.SITU

    @property
    def clamps_up(self) -> bool:
        return self.pattern is Pattern.UP_CLAMP and self.rule.limit is not None


def _drawn_mlp(draw: _Draw, device: torch.device) -> tuple[Tensor, Tensor]:
    """(w13 [2W, H], w2 [H, W]) bf16 on the default device; to be read only."""
    gates = _gates(draw)
    return torch.cat([gates.matrix, _ups(draw, gates.is_clamped)]), _down_rows(draw)


_kept_mlp = lru_cache(maxsize=64)(_drawn_mlp)


@dataclass(frozen=True, slots=True, eq=False)
class _Gates:
    """[W, H] bf16 gate rows, and [W] bool which of them reach a limit on whose edge up is small."""

    matrix: Tensor
    is_clamped: Tensor


def _gates(draw: _Draw) -> _Gates:
    """One term a row: most read an anchor and are open, a few are closed, some read any value."""
    width, generator = draw.width, draw.generator("gate")
    share = uniform(generator, width)
    anchors = torch.arange(0, draw.hidden_size, BLOCK)
    column = _picked(anchors, width, generator)
    ordinary = _picked(_ordinary_columns(draw), width, generator)
    weight = torch.full((width,), SATURATING) if draw.saturates else 2 * _units(column)
    is_closed = share < CLOSED_SHARE
    is_ordinary = (share >= 1 - ORDINARY_SHARE) & draw.saturates
    if draw.clamps_up and _reaches_identity(draw.rule):
        column[:], weight[:], is_ordinary[:] = 0, IDENTITY / ANCHOR, False
    is_clamped = is_ordinary.clone()
    if draw.avoids_edge:
        is_clamped |= share >= 1 - ORDINARY_SHARE - CLAMPED_SHARE
        is_clamped &= not draw.clamps_up
        is_ordinary &= is_clamped
        is_below = ~is_clamped & ~is_closed
        column[is_below], weight[is_below] = 0, 4 / ANCHOR  # silu(4), which codes round to 4
    column = torch.where(is_ordinary, ordinary, column)
    weight[is_closed] = -SATURATING
    return _Gates(_one_a_row(draw, column, weight), is_clamped)


def _reaches_identity(rule: GatedActivation) -> bool:
    """Whether a gate may be so large that silu leaves it as it is, below its clamp."""
    return rule.limit is not None and rule.limit >= IDENTITY


def _ups(draw: _Draw, is_clamped: Tensor) -> Tensor:
    """[W, H] bf16: one value of the token, times +-1; oai_swiglu's ``up + 1`` gets a -1 with it."""
    width, generator = draw.width, draw.generator("up")
    column = _picked(_ordinary_columns(draw), width, generator)
    weight = _units(column) * _signs(width, generator)
    if draw.clamps_up and draw.is_oai:  # -limit + 1 would need more bits
        anchors = torch.arange(0, draw.hidden_size, BLOCK)
        return _one_a_row(
            draw, _picked(anchors, width, generator), torch.full((width,), 2 * ANCHOR)
        )
    if draw.clamps_up:
        return _one_a_row(draw, column, 2 * ANCHOR * weight)
    if draw.avoids_edge:
        weight = torch.where(is_clamped, weight / 2, weight)
    rows = _one_a_row(draw, column, weight)
    if draw.is_oai:
        rows[:, 0] = -1 / ANCHOR
    return rows


def _down_rows(draw: _Draw) -> Tensor:
    """[H, W] bf16: one term a row, some two: in one block of 128 columns, or anywhere."""
    rows, generator = draw.hidden_size, draw.generator("down")
    first = integers(generator, 0, draw.width, rows)
    start = first // BLOCK * BLOCK
    room = (draw.width - start).clamp(max=BLOCK)
    if draw.pattern is Pattern.CROSSING:
        start, room = torch.zeros_like(start), torch.full_like(room, draw.width)
    second = start + integers(generator, 0, 1 << 30, rows) % room
    has_second = uniform(generator, rows) < SECOND_TERM_SHARE
    matrix = torch.zeros(rows, draw.width, dtype=torch.bfloat16)
    row = torch.arange(rows)
    matrix[row, first] = (draw.down * _signs(rows, generator)).to(torch.bfloat16)
    signs = (draw.down * _signs(rows, generator)).to(torch.bfloat16)
    matrix[row[has_second], second[has_second]] = signs[has_second]
    return matrix


def _ordinary_columns(draw: _Draw) -> Tensor:
    """Columns that are no anchor; beside oai's -1/8 a group of fp4 would have no room for them."""
    columns = torch.arange(draw.hidden_size)
    first = min(FP4_GROUP, draw.hidden_size - 1) if draw.is_oai else 0
    return columns[(columns % BLOCK != 0) & (columns >= first)]


def _units(column: Tensor) -> Tensor:
    """Weights that make what tokens hold in a column +-2 or +-4."""
    return torch.where(column < BLOCK, 2.0, 1.0)


def _picked(choices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return choices[integers(generator, 0, len(choices), count)]


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return 1.0 - 2.0 * integers(generator, 0, 2, count)


def _one_a_row(draw: _Draw, column: Tensor, weight: Tensor) -> Tensor:
    """[W, H] bf16 with one term in each row."""
    matrix = torch.zeros(draw.width, draw.hidden_size, dtype=torch.bfloat16)
    matrix[torch.arange(draw.width), column] = weight.to(torch.bfloat16)
    return matrix
