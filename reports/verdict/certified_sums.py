"""The certificate behind the experts: sums over routes, shards and ranks, and the output."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenModel, PartialStores, SharedInSum, round_bf16
from reports.verdict.band import fp32_noise
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.exact_rows import Certain
from reports.verdict.exact_sums import BF16_BITS, FP32_BITS, Conditions, low_bit

BLOCK_BYTES = 1 << 26
"""Of one shard's float64 terms: tokens are summed in blocks of at most so many bytes, or singly."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """[T, H] float64 sums: values, sums of |terms|, what divides every term, and who is certain."""

    value: Tensor
    magnitude: Tensor
    quantum: Tensor
    is_certain: Tensor

    @staticmethod
    def of(terms: Tensor, is_certain: Tensor) -> "_Sum":
        """Of [T, N, H] terms."""
        return _Sum(
            terms.sum(1), terms.abs().sum(1), low_bit(terms).amin(1, True)[:, 0], is_certain.all(1)
        )

    def plus(self, other: "_Sum") -> "_Sum":
        """Of the terms of both."""
        return _Sum(
            self.value + other.value,
            self.magnitude + other.magnitude,
            torch.minimum(self.quantum, other.quantum),
            self.is_certain & other.is_certain,
        )


class CertifiedSums:
    """What becomes of the experts' outputs.

    Args:
        stages: up to the experts' outputs.
        model: places of stores, and the routed scaling factor.
        topk_weights: [T, K] float64.
        ep_ranks: [T, K] int64, the EP rank that computes each route.

    Attributes:
        routed: [T, H] what the ranks' sums add up to, stored; the shared expert is in it where the
            ranks add it before the sum.
        has_few_bits: [T, H] bool: whichever routes of a token a rank adds up, in whatever order,
            its sum is one number before a factor off the grid is applied.
        output: [T, H]
        same_topology_only: the factor makes each rank's stored sum a rounding of its own, so
            another topology may answer otherwise.
    """

    def __init__(
        self, stages: CertifiedLayer, model: GoldenModel, topk_weights: Tensor, ep_ranks: Tensor
    ) -> None:
        self._model, self._conditions = model, stages.conditions
        self._width = stages.tokens.value.shape[1]
        self._ranks, self._top_k = ep_ranks, topk_weights.shape[1]
        path = model.path
        kept = round_bf16(topk_weights) if path.stores_weights else topk_weights
        self._weights, self._outputs = kept.flatten()[:, None], stages.routes.outputs
        self.factor = model.routed_scaling_factor if path.folds_factor else 1.0
        self.same_topology_only = self.factor * 2**BF16_BITS % 1 != 0
        self._parts = _shared_parts(stages, path.shared)
        self.routed, self.has_few_bits = self._summed(len(topk_weights))
        self.output = self._finished(stages)

    def stored_partial(self, value: Tensor) -> Certain:
        """What a rank stores of [N, D] exact weighted sums, and whether that is one number."""
        scaled = self.factor * value
        noise = torch.zeros_like(value)
        if self.same_topology_only:
            noise = fp32_noise(scaled.abs(), 2)  # the factor itself, and its product
        if self._model.path.partials is PartialStores.NOTHING:
            return Certain(scaled, torch.ones_like(value, dtype=torch.bool))
        single = round_bf16(scaled - noise) == round_bf16(scaled + noise)
        return Certain(round_bf16(scaled), single)

    def weighted(self, shard: int, routes: Tensor | slice) -> Certain:
        """[N, D] outputs of N of the T * K routes in a shard, times their weights."""
        outputs = self._outputs[shard]
        value = outputs.value[routes] * self._weights[routes]
        return Certain(value, outputs.is_certain[routes])

    def _terms(self, shard: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """([B, K, H] weighted routes of some tokens, which are certain)."""
        found = self.weighted(shard, slice(tokens.start * self._top_k, tokens.stop * self._top_k))
        shape = (tokens.stop - tokens.start, self._top_k, -1)
        value, certain = found.value.view(shape), found.is_certain.view(shape)
        return value[..., : self._width], certain[..., : self._width]

    def _summed(self, num_tokens: int) -> tuple[Certain, Tensor]:
        """[T, H] over all routes, shards and ranks, and ``has_few_bits``; block by block."""
        of_block = self._summed_by_rank if self.same_topology_only else self._summed_at_once
        step = max(1, BLOCK_BYTES // (8 * self._top_k * self._outputs[0].value.shape[1]))
        starts = range(0, max(1, num_tokens), step)
        found = [of_block(slice(start, min(start + step, num_tokens))) for start in starts]
        total = Certain(
            torch.cat([one.value for one, _ in found]),
            torch.cat([one.is_certain for one, _ in found]),
        )
        return total, torch.cat([few for _, few in found])

    def _summed_at_once(self, tokens: slice) -> tuple[Certain, Tensor]:
        """Where no rank's sum is a rounding of its own."""
        total: _Sum | None = None
        for shard in range(len(self._outputs)):
            values, certain = self._terms(shard, tokens)
            one = _Sum.of(self.factor * values, certain)
            total = one if total is None else total.plus(one)
        assert total is not None
        if self._parts:
            total = total.plus(_stacked(self._parts_of(tokens)))
        if self._model.path.partials is PartialStores.NOTHING:
            stage, name, bits = Stage.COMBINE, "weighted sums", FP32_BITS
        else:
            stage, name, bits = Stage.POST_PERMUTE, "partial sums", BF16_BITS
        return _stored_sum(total, stage, name, bits, self._conditions)

    def _summed_by_rank(self, tokens: slice) -> tuple[Certain, Tensor]:
        """Where every rank's sum is rounded: each of them, then their sum."""
        total: _Sum | None = None
        terms = [self._terms(shard, tokens) for shard in range(len(self._outputs))]
        few = torch.ones_like(terms[0][1][:, 0])
        parts = self._parts_of(tokens)
        for ep_rank in range(self._model.path.ep_size):
            on_rank = (self._ranks[tokens] == ep_rank)[:, :, None]
            for values, certain in terms:
                mine = _Sum.of(values * on_rank, certain | ~on_rank)
                few &= mine.magnitude <= mine.quantum * 2.0**self._rank_bits
                partial = self.stored_partial(mine.value)
                summand = Certain(partial.value, partial.is_certain & mine.is_certain & few)
                if parts:
                    summand = _added(summand, parts.pop(0))
                one = _stacked([summand])
                total = one if total is None else total.plus(one)
        assert total is not None
        self._conditions.require("a rank's stored sum is one value", total.is_certain)
        name = "sums over ranks"
        summed, _ = _stored_sum(total, Stage.COMBINE, name, FP32_BITS, self._conditions)
        return summed, few

    def _parts_of(self, tokens: slice) -> list[Certain]:
        """What the first ranks add of the shared expert for some tokens."""
        return [Certain(one.value[tokens], one.is_certain[tokens]) for one in self._parts]

    @property
    def _rank_bits(self) -> int:
        """That a rank's sum keeps before a factor meets it."""
        return BF16_BITS if self._model.path.scales_stored_sum else FP32_BITS

    def _finished(self, stages: CertifiedLayer) -> Certain:
        """[T, H] with what is added behind the sum; one rounding, fused or not."""
        path = self._model.path
        factor = 1.0 if path.folds_factor else self._model.routed_scaling_factor
        scaled = factor * self.routed.value
        behind = torch.zeros_like(scaled)
        certain = self.routed.is_certain
        if stages.shared is not None and path.shared is SharedInSum.ABSENT:
            (whole,) = stages.shared[1].outputs
            behind, certain = whole.value, certain & whole.is_certain
        magnitude, value = scaled.abs() + behind.abs(), scaled + behind
        quantum = torch.minimum(low_bit(scaled), low_bit(behind))
        is_exact = magnitude <= quantum * 2.0**FP32_BITS
        noise = fp32_noise(magnitude, 3).masked_fill_(is_exact, 0.0)
        single = round_bf16(value - noise) == round_bf16(value + noise)
        self._conditions.require("output stores one value", single)
        return Certain(round_bf16(value), certain & single)


def _shared_parts(stages: CertifiedLayer, shared: SharedInSum) -> tuple[Certain, ...]:
    """[T, H] what the first ranks add of the shared expert before the sum."""
    if stages.shared is None or shared is SharedInSum.ABSENT:
        return ()
    return stages.shared[1].outputs


def _stacked(parts: tuple[Certain, ...] | list[Certain]) -> _Sum:
    return _Sum.of(
        torch.stack([part.value for part in parts], dim=1),
        torch.stack([part.is_certain for part in parts], dim=1),
    )


def _added(first: Certain, second: Certain) -> Certain:
    """Two stored values, added in fp32 and stored: one rounding."""
    return Certain(round_bf16(first.value + second.value), first.is_certain & second.is_certain)


def _stored_sum(
    total: _Sum, stage: Stage, name: str, bits: int, conditions: Conditions
) -> tuple[Certain, Tensor]:
    """A sum rounded once, and [T, H] bool where every order of its terms gives that number."""
    few = conditions.sums(stage, name, bits, quantum=total.quantum, magnitude=total.magnitude)
    return Certain(round_bf16(total.value), total.is_certain & few), few
