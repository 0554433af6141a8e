"""Weights prepared by a wrong step: rounded late, not again, or with other scales."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import quantize_blocks, round_bf16, shared_recipe
from moe.mistakes import Mistake
from moe.weights import ExpertMatrix
from reports.verdict.decode import codes_f64, spread_blocks
from reports.verdict.diagnosis.case import Case
from reports.verdict.golden_matrix import prepared_matrix, stored_matrix
from reports.verdict.stage_weights import shard_of

Law = tuple[Mistake, str, Tensor]


def other_preparations(case: Case, slot: int, group: str, name: str) -> Iterator[Law]:
    """Each wrong preparation of the matrix that a slot should hold, [N, K] float64."""
    stored = _stored(case, slot, group)
    if stored is None:
        return
    matrix = stored[0] if name == "w13" else stored[1]
    for mistake, words, value in _laws(case, matrix, group):
        yield mistake, words, _shard(case, group, name, value)


def _stored(case: Case, slot: int, group: str) -> tuple[ExpertMatrix, ExpertMatrix] | None:
    """(w13, w2) of the checkpoint."""
    preparation = case.scene.weights.preparation
    if group == "shared":
        held = preparation.parts.shared
    else:
        held = preparation.stored(case.layer.local_experts(case.rank)[slot])
    return None if held is None else (held.w13, held.w2)


def _shard(case: Case, group: str, name: str, value: Tensor) -> Tensor:
    """The part of a whole matrix that the rank holds."""
    layer = case.layer
    shard = layer.shared_shard(case.rank) if group == "shared" else layer.expert_shard(case.rank)
    if shard.count == 1:
        return value
    empty = value.new_empty((0, value.shape[0] // 2))
    pair = (value, empty) if name == "w13" else (value.new_empty((2 * value.shape[1], 0)), value)
    return shard_of(pair, shard)[0 if name == "w13" else 1]


def _laws(case: Case, matrix: ExpertMatrix, group: str) -> Iterator[Law]:
    """By the recipe of the matrix."""
    layer = case.layer
    recipe = shared_recipe(layer.recipe) if group == "shared" else layer.recipe
    is_packed = layer.scale_format is ScaleFormat.UE8M0
    if matrix.scale is None:
        return
    if recipe is QuantRecipe.FP8_BLOCK128 and is_packed:
        yield from _of_blocks(matrix)
    if recipe is QuantRecipe.FP8_PER_TENSOR:
        yield from _of_tensors(matrix, layer.scale_format)
    if matrix.scale.dtype == torch.uint8 and matrix.scale.shape[-1] > 1:
        yield from _of_groups(matrix, recipe, layer.scale_format)


def _of_blocks(matrix: ExpertMatrix) -> Iterator[Law]:
    """fp8 codes that should be quantised again under powers of two."""
    assert matrix.scale is not None
    codes, scale = codes_f64(matrix.values[0]), matrix.scale[0].to(torch.float64)
    power = torch.exp2(torch.log2(scale).ceil())
    yield (
        Mistake.SCALE_LATE,
        "scales rounded up to powers of two, codes not quantised again: values "
        f"{float((power / scale).mean()):.4g} times too large on average",
        codes * spread_blocks(power, codes.shape),
    )
    blocks = quantize_blocks(round_bf16(stored_matrix(matrix)), ScaleFormat.FP32)
    cut = torch.exp2(torch.log2(blocks.scale).floor())
    yield (
        Mistake.SCALE_EXPONENT,
        "quantised again with fp32 scales, whose mantissas packing dropped: values "
        f"{float((cut / blocks.scale).mean()):.4g} times their size on average",
        blocks.codes * spread_blocks(cut, codes.shape),
    )
    fp32 = torch.exp2(torch.log2(scale).floor())
    yield (
        Mistake.SCALE_EXPONENT,
        "scales rounded down to powers of two, codes not quantised again",
        codes * spread_blocks(fp32, codes.shape),
    )


def _of_tensors(matrix: ExpertMatrix, scales: ScaleFormat) -> Iterator[Law]:
    """One scale a matrix: gate's and up's are two."""
    assert matrix.scale is not None
    if matrix.scale.shape[-1] != 2:
        return
    for words, part in (("gate's scale used for up", 0), ("up's scale used for gate", 1)):
        one = matrix.scale[:, part : part + 1].expand(matrix.scale.shape).contiguous()
        misread = replace(matrix, scale=one)
        value = prepared_matrix(misread, QuantRecipe.FP8_PER_TENSOR, scales)
        yield Mistake.SCALE_DONOR, words, value


def _of_groups(matrix: ExpertMatrix, recipe: QuantRecipe, scales: ScaleFormat) -> Iterator[Law]:
    """Scales of 32 columns looked up as if each covered more."""
    assert matrix.scale is not None
    groups = torch.arange(matrix.scale.shape[-1])
    for times in (2, 4):
        misread = replace(matrix, scale=matrix.scale[..., groups // times])
        words = f"scales looked up as if each covered {times} times as many columns"
        yield Mistake.SCALE_DONOR, words, prepared_matrix(misread, recipe, scales)
