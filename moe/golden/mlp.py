"""One gated MLP in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden.activations import Stores, gated, gated_as_stored, stores_of
from moe.golden.model import GoldenModel, activation_group, shared_recipe
from moe.golden.number_formats import round_bf16
from moe.golden.path import PartialStores, RoundingPath, SharedInSum
from moe.golden.quantize import GROUP_AMAX_FLOOR, LOW_LATENCY_AMAX_FLOOR, quantize_groups

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where values are rounded: nowhere, or at the recipe's own rounding points.

    store            what is kept of a sum
    quantize         what is kept of a row in front of a GEMM of the shared expert
    dispatch         what is kept of a token in front of the experts' first GEMM
    quantize_middle  what is kept of a row in front of the experts' second GEMM
    activate         [R, 2I] -> [R, I] of the grouped rows, in front of the quantiser
    activate_dense   the same of the shared expert
    path             how sums are spread over ranks
    """

    store: Rounding
    quantize: Rounding
    dispatch: Rounding
    quantize_middle: Rounding
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
        return gated(gate_up, model.activation)

    return Arithmetic(
        store=keep,
        quantize=keep,
        dispatch=keep,
        quantize_middle=keep,
        activate=activate,
        activate_dense=activate,
        path=RoundingPath(folds_factor=model.path.folds_factor),
    )


def recipe_arithmetic(model: GoldenModel) -> Arithmetic:
    """The recipe's quantisers, and a bf16 store wherever the path has one."""
    scales, rule = model.scale_format, model.activation

    def quantize(x: Tensor) -> Tensor:
        return _in_groups(x, scales, activation_group(shared_recipe(model.recipe)))

    def quantize_middle(x: Tensor) -> Tensor:
        return _in_groups(x, scales, model.middle_group)

    def dispatch(x: Tensor) -> Tensor:
        floor = LOW_LATENCY_AMAX_FLOOR if model.path.low_latency_wire else GROUP_AMAX_FLOOR
        group_size = model.input_group or model.activation_group
        sent = _in_groups(x, model.wire_format or scales, group_size, floor)
        if model.wire_format in (None, scales):
            return sent
        in_fp32 = sent.to(torch.float32).to(torch.float64)
        return _in_groups(in_fp32, scales, group_size)

    stores = stores_of(rule, model.path.layout, scales)
    return Arithmetic(
        store=round_bf16,
        quantize=quantize,
        dispatch=dispatch,
        quantize_middle=quantize_middle,
        activate=lambda gate_up: gated_as_stored(gate_up, rule, stores),
        activate_dense=lambda gate_up: gated_as_stored(gate_up, rule, Stores.PRODUCT),
        path=model.path,
    )


def _in_groups(
    x: Tensor, scales: ScaleFormat, group_size: int | None, floor: float = GROUP_AMAX_FLOOR
) -> Tensor:
    """What quantising leaves of [R, C]; everything where no columns share a scale."""
    if group_size is None:
        return x
    return quantize_groups(x, scales, group_size, floor).dequantized


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


def run_expert(x: Tensor, w13_w2: tuple[Tensor, Tensor], by: Arithmetic) -> MlpRows:
    """Rows [R, H], quantised already, through a routed expert up to its second GEMM."""
    w13, w2 = w13_w2
    gate_up = by.store(x @ w13.T)
    return MlpRows(gate_up=gate_up, activation=by.quantize_middle(by.activate(gate_up)), w2=w2)


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
    """The shared expert over rows [T, H], which it quantises for itself."""
    if w13_w2 is None:
        return SharedBranch(parts=None, behind=None)
    path, (w13, w2) = arithmetic.path, w13_w2
    gate_up = arithmetic.store(arithmetic.quantize(x) @ w13.T)
    activation = arithmetic.quantize(arithmetic.activate_dense(gate_up))
    rows = MlpRows(gate_up=gate_up, activation=activation, w2=w2)
    num_shards = path.world_size if path.shared is SharedInSum.SHARDED else 1
    outputs = rows.outputs(num_shards, arithmetic.store)
    if path.shared is SharedInSum.ABSENT:
        return SharedBranch(parts=None, behind=next(outputs))
    return SharedBranch(parts=outputs, behind=None)
