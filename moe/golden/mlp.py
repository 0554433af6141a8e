"""One gated MLP in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden.activations import Stores, gated, gated_as_stored, stores_of
from moe.golden.model import GoldenModel, activation_group, shared_recipe
from moe.golden.number_formats import round_bf16
from moe.golden.path import PartialStores, RoundingPath, SharedInSum
from moe.golden.quantize import GROUP_AMAX_FLOOR, LOW_LATENCY_AMAX_FLOOR, Quantized, quantize_groups

Rounding = Callable[[Tensor], Tensor]
GroupQuantizer = Callable[[Tensor, ScaleFormat, int, float], Quantized]
Product = Callable[[Tensor, Tensor], Tensor]


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, N] of [R, K] and [N, K], all float64."""
    return x @ weight.T


def ascending(count: int) -> Sequence[int]:
    """Ranks, or experts of a rank, as they come."""
    return range(count)


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
    product          [R, K] and [N, K] -> [R, N]
    order            of ranks, and of a rank's experts, in which they enter sums
    summed_in        dtype of sums
    """

    store: Rounding
    quantize: Rounding
    dispatch: Rounding
    quantize_middle: Rounding
    activate: Rounding
    activate_dense: Rounding
    path: RoundingPath
    product: Product = exact_product
    order: Callable[[int], Sequence[int]] = ascending
    summed_in: torch.dtype = torch.float64

    def store_partial(self, weighted_sum: Tensor) -> Tensor:
        """What is kept of a rank's weighted sum."""
        nothing = self.path.partials is PartialStores.NOTHING
        return weighted_sum if nothing else self.store(weighted_sum)

    def store_route(self, weighted: Tensor) -> Tensor:
        """What is kept of one weighted route."""
        return self.store(weighted) if self.path.partials is PartialStores.ROUTE else weighted

    def store_weight(self, weight: Tensor) -> Tensor:
        """What is kept of a top-k weight."""
        weight = weight.to(self.summed_in)
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
    return rounded_at(model, round_bf16, quantize_groups)


def rounded_at(model: GoldenModel, store: Rounding, in_groups: GroupQuantizer) -> Arithmetic:
    """The recipe's rounding points, with these two roundings at them.

    Args:
        model: what the layer computes.
        store: rounds the dtype of sums to bf16.
        in_groups: see ``quantize_groups``; takes float64.
    """
    scales, rule = model.scale_format, model.activation

    def kept(
        x: Tensor, scales: ScaleFormat, group_size: int | None, floor: float = GROUP_AMAX_FLOOR
    ) -> Tensor:
        """What quantising leaves of [R, C]; everything where no columns share a scale."""
        return x if group_size is None else in_groups(x, scales, group_size, floor).dequantized

    def quantize(x: Tensor) -> Tensor:
        return kept(x, scales, activation_group(shared_recipe(model.recipe)))

    def quantize_middle(x: Tensor) -> Tensor:
        return kept(x, scales, model.middle_group)

    def dispatch(x: Tensor) -> Tensor:
        floor = LOW_LATENCY_AMAX_FLOOR if model.path.low_latency_wire else GROUP_AMAX_FLOOR
        group_size = model.input_group or model.activation_group
        sent = kept(x, model.wire_format or scales, group_size, floor)
        if model.wire_format in (None, scales):
            return sent
        in_fp32 = sent.to(torch.float32).to(torch.float64)
        return kept(in_fp32, scales, group_size)

    stores = stores_of(rule, model.path.layout, scales)
    return Arithmetic(
        store=store,
        quantize=quantize,
        dispatch=dispatch,
        quantize_middle=quantize_middle,
        activate=lambda gate_up: gated_as_stored(gate_up, rule, stores, store),
        activate_dense=lambda gate_up: gated_as_stored(gate_up, rule, Stores.PRODUCT, store),
        path=model.path,
    )


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

    def outputs(self, num_shards: int, by: Arithmetic) -> Iterator[Tensor]:
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
        return (by.store(by.product(activation, w2)) for activation, w2 in shards)


def run_expert(x: Tensor, w13_w2: tuple[Tensor, Tensor], by: Arithmetic) -> MlpRows:
    """Rows [R, H], quantised already, through a routed expert up to its second GEMM."""
    w13, w2 = w13_w2
    gate_up = by.store(by.product(x, w13))
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
    gate_up = arithmetic.store(arithmetic.product(arithmetic.quantize(x), w13))
    activation = arithmetic.quantize(arithmetic.activate_dense(gate_up))
    rows = MlpRows(gate_up=gate_up, activation=activation, w2=w2)
    num_shards = path.world_size if path.shared is SharedInSum.SHARDED else 1
    outputs = rows.outputs(num_shards, arithmetic)
    if path.shared is SharedInSum.ABSENT:
        return SharedBranch(parts=None, behind=next(outputs))
    return SharedBranch(parts=outputs, behind=None)
