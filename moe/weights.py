"""A layer's weights, as checkpoints hold them and as GEMMs read them, and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertMatrix:
    """One matrix of several experts, as a checkpoint holds it or as a GEMM consumes it.

    values      [L, N, K] bf16 or e4m3, or [L, N, K/2] uint8: two e2m1 codes a byte, the earlier
                column in the low half
    scale       None (bf16), or multiply by it: [L, ceil(N/128), ceil(K/128)] fp32;
                [L, N, K/group_size] uint8 UE8M0 (a checkpoint's); [L, P] fp32, one for each of P
                equal parts of the rows (a checkpoint's); [L, N, ceil(K/group_size/4)] int32 packed
                UE8M0, MN-major
    group_size  columns of a row that share a scale; means nothing where there is one a part
    """

    values: Tensor
    scale: Tensor | None
    group_size: int = 128

    @property
    def in_features(self) -> int:
        """K, the columns that it is multiplied over."""
        columns = self.values.shape[-1]
        return 2 * columns if self.values.dtype == torch.uint8 else columns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertWeights:
    """Both matrices of a set of experts.

    w13  [L, 2I, H]  gate rows first, then up rows
    w2   [L, H, I]
    """

    w13: ExpertMatrix
    w2: ExpertMatrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """All weights one rank needs.

    expert_ids       [L]     int64  logical expert in each local slot
    experts          its matrices
    shared           the shared expert as one expert (L = 1), or None
    gate_weight      [E, H]  bf16
    correction_bias  [E]     fp32, or None
    tid2eid          [V, K]  int32 experts of each vocabulary id, in hash layers; or None
    """

    expert_ids: Tensor
    experts: ExpertWeights
    shared: ExpertWeights | None
    gate_weight: Tensor
    correction_bias: Tensor | None
    tid2eid: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CommonWeights:
    """The parts of a layer that every rank holds; fields as in ``LayerWeights``."""

    shared: ExpertWeights | None
    gate_weight: Tensor
    correction_bias: Tensor | None
    tid2eid: Tensor | None = None


class WeightSource(Protocol):
    """Where a layer's weights come from; a plain value that can be sent to a rank.

    Tensors lie on torch's default device, and their values are the same on every one.
    """

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """Checkpoint tensors of these logical experts, at least one."""
        ...

    def common(self) -> CommonWeights:
        """What every rank holds."""
        ...

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """(w13 [2I, H], w2 [H, I]) float64 of one expert before any rounding of a recipe."""
        ...

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The same for the shared expert."""
        ...


def checkpoint_weights(source: WeightSource, expert_ids: Sequence[int]) -> LayerWeights:
    """Checkpoint tensors of one rank that holds these logical experts."""
    common = source.common()
    return LayerWeights(
        expert_ids=torch.tensor(expert_ids, dtype=torch.int64, device=common.gate_weight.device),
        experts=source.experts(expert_ids),
        shared=common.shared,
        gate_weight=common.gate_weight,
        correction_bias=common.correction_bias,
        tid2eid=common.tid2eid,
    )
