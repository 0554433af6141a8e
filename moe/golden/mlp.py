"""One gated MLP in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import GemmLayout
from moe.golden.model import GoldenModel
from moe.golden.number_formats import round_bf16
from moe.golden.path import PartialStores, RoundingPath, SharedInSum
from moe.golden.quantize import LOW_LATENCY_AMAX_FLOOR, quantize_groups
from moe.golden.stages import gated_silu

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where values are rounded: nowhere, or at the recipe's own rounding points.

    store            what is kept of a sum
    quantize         what is kept of a row in front of a GEMM
    dispatch         what is kept of a token in front of the experts' first GEMM
    activate         [R, 2I] -> [R, I] of the grouped rows, in front of the quantiser
    activate_dense   the same of the shared expert
    path             how sums are spread over ranks
    """

    store: Rounding
    quantize: Rounding
    dispatch: Rounding
    activate: Rounding
    activate_dense: Rounding
    path: RoundingPath

    def store_partial(self, weighted_sum: Tensor) -> Tensor:
        """What is kept of a rank's weighted sum."""
        nothing = self.path.partials is PartialStores.NOTHING
        return weighted_sum if nothing else self.store(weighted_sum)

    def store_route(self, weighted: Tensor) -> Tensor:
        """What is kept of one weighted route."""
        return self.store(weighted) if self.path.partials is PartialStores.ROUTE else weighted

    def store_weight(self, weight: Tensor) -> Tensor:
        """What is kept of a top-k weight."""
        return self.store(weight) if self.path.stores_weights else weight


def ideal_arithmetic(model: GoldenModel) -> Arithmetic:
    """No rounding, so nothing of the path but the place of the scaling factor."""

    def keep(x: Tensor) -> Tensor:
        return x

    def activate(gate_up: Tensor) -> Tensor:
        return gated_silu(gate_up, model.swiglu_limit)

    return Arithmetic(
        store=keep,
        quantize=keep,
        dispatch=keep,
        activate=activate,
        activate_dense=activate,
        path=RoundingPath(folds_factor=model.path.folds_factor),
    )


def recipe_arithmetic(model: GoldenModel) -> Arithmetic:
    """The recipe's quantisers, and a bf16 store wherever the path has one."""
    group_size, limit = model.activation_group, model.swiglu_limit
    if limit is not None:  # the clamp compares bf16 values
        limit = float(round_bf16(torch.tensor(limit, dtype=torch.float64)))

    def quantize(x: Tensor) -> Tensor:
        if group_size is None:
            return x
        return quantize_groups(x, model.scale_format, group_size).dequantized

    def quantize_on_the_wire(x: Tensor) -> Tensor:
        if group_size is None or not model.path.low_latency_wire:
            return quantize(x)
        floor = LOW_LATENCY_AMAX_FLOOR
        return quantize_groups(x, model.scale_format, group_size, floor).dequantized

    def stored_once(gate_up: Tensor) -> Tensor:
        return round_bf16(gated_silu(gate_up, limit))

    def not_stored(gate_up: Tensor) -> Tensor:
        return gated_silu(gate_up, limit)

    fused = model.path.layout is GemmLayout.MASKED and group_size is not None
    masked = _silu_stored if limit is None else not_stored
    return Arithmetic(
        store=round_bf16,
        quantize=quantize,
        dispatch=quantize_on_the_wire,
        activate=masked if fused else stored_once,
        activate_dense=stored_once,
        path=model.path,
    )


def _silu_stored(gate_up: Tensor) -> Tensor:
    """silu(gate) stored, then its product with up stored; no clamp.

    Source: SGLang 0.5.21, the masked runner without a limit: silu_and_mul on bf16.
    """
    gate, up = gate_up.chunk(2, dim=1)
    return round_bf16(round_bf16(gate / (1.0 + torch.exp(-gate))) * up)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpRows:
    """One expert over some rows, up to its second GEMM.

    gate_up     [R, 2I]
    activation  [R, I]  dequantised input of the second GEMM
    w2          [H, I]
    """

    gate_up: Tensor
    activation: Tensor
    w2: Tensor

    def outputs(self, num_shards: int, store: Rounding) -> Iterator[Tensor]:
        """[R, H] stored output over each shard of the intermediate axis.

        Raises:
            ValueError: the axis does not divide.
        """
        width = self.w2.shape[1]
        if width % num_shards:
            raise ValueError(f"an intermediate size of {width} does not divide by {num_shards}")
        shards = zip(
            self.activation.chunk(num_shards, dim=1), self.w2.chunk(num_shards, dim=1), strict=True
        )
        return (store(activation @ w2.T) for activation, w2 in shards)


def run_mlp(
    x: Tensor, w13_w2: tuple[Tensor, Tensor], activate: Rounding, arithmetic: Arithmetic
) -> MlpRows:
    """Rows [R, H], quantised already, through one gated MLP up to its second GEMM."""
    w13, w2 = w13_w2
    gate_up = arithmetic.store(x @ w13.T)
    return MlpRows(gate_up=gate_up, activation=arithmetic.quantize(activate(gate_up)), w2=w2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedBranch:
    """The shared expert, as far as it belongs to the ranks' sum or behind it.

    parts   [T, H] each, stored: what the first ranks add to their partials, computed when asked
            for; None: nothing
    behind  [T, H] stored, added to the finished sum; None: nothing
    """

    parts: Iterator[Tensor] | None
    behind: Tensor | None


def run_shared(
    x: Tensor, w13_w2: tuple[Tensor, Tensor] | None, arithmetic: Arithmetic
) -> SharedBranch:
    """The shared expert over rows [T, H] that are quantised already."""
    if w13_w2 is None:
        return SharedBranch(parts=None, behind=None)
    path = arithmetic.path
    rows = run_mlp(x, w13_w2, arithmetic.activate_dense, arithmetic)
    num_shards = path.world_size if path.shared is SharedInSum.SHARDED else 1
    outputs = rows.outputs(num_shards, arithmetic.store)
    if path.shared is SharedInSum.ABSENT:
        return SharedBranch(parts=None, behind=next(outputs))
    return SharedBranch(parts=outputs, behind=None)
