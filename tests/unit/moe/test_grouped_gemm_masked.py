"""The masked form of the reference GEMM: the same bits as the contiguous form, slab by slab."""

import pytest
import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.grouped_gemm import TorchGemm, TorchMatrix
from moe.quant.fp8 import QuantizedRows, quantize_blocks, quantize_groups
from moe.slabs import spread_slab_scales, spread_slabs
from moe.weight_preparation import requantize_ue8m0
from moe.weights import ExpertMatrix

HEIGHT, N, K = 256, 192, 384
MASKED_M = [70, 0, 5]
FORMATS = pytest.mark.parametrize(
    "scale_format", [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]
)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def loaded(scale_format: ScaleFormat) -> TorchMatrix:
    weights = drawn(2, len(MASKED_M), N, K)
    if scale_format is ScaleFormat.NONE:
        return TorchGemm().load(ExpertMatrix(values=weights, scale=None))
    blocks = quantize_blocks(weights, ScaleFormat.FP32)
    matrix = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    return TorchGemm().load(
        requantize_ue8m0(matrix) if scale_format is ScaleFormat.UE8M0 else matrix
    )


def operand(scale_format: ScaleFormat) -> tuple[Tensor, Tensor | None]:
    """75 rows, with scales where they are quantised."""
    rows = drawn(1, sum(MASKED_M), K)
    if scale_format is ScaleFormat.NONE:
        return rows, None
    quantized: QuantizedRows = quantize_groups(rows, scale_format)
    return quantized.values, quantized.scale


def in_slabs(scale_format: ScaleFormat, masked_m: list[int]) -> Tensor:
    """The rows from the first on, ``masked_m`` of them a slab, multiplied with their experts."""
    rows, scale = operand(scale_format)
    places = torch.cat([HEIGHT * e + torch.arange(m) for e, m in enumerate(masked_m)])
    rows, count = rows[: len(places)], len(masked_m)
    slabs = spread_slabs(rows, places, count, HEIGHT)
    if scale is not None:
        scale = spread_slab_scales(scale[: len(places)], places, count, HEIGHT)
    counts = torch.tensor(masked_m, dtype=torch.int32)
    return TorchGemm().grouped_gemm_nt_masked(slabs, scale, loaded(scale_format), counts)


def end_to_end(scale_format: ScaleFormat) -> Tensor:
    """The same rows in segments end to end."""
    rows, scale = operand(scale_format)
    experts = torch.tensor([0] * 70 + [2] * 5, dtype=torch.int32)
    return TorchGemm().grouped_gemm_nt_contig(rows, scale, loaded(scale_format), experts)


def bits(rows: Tensor) -> list[list[int]]:
    return rows.view(torch.int16).tolist()


@FORMATS
def test_a_row_has_the_bits_it_has_in_a_segment(scale_format):
    slabs = in_slabs(scale_format, MASKED_M)
    got = torch.cat([slabs[0, :70], slabs[2, :5]])
    assert not bool(got.isnan().any())
    assert bits(got) == bits(end_to_end(scale_format))


@FORMATS
def test_a_row_has_the_same_bits_whatever_fills_the_slab_and_the_others(scale_format):
    full, alone = in_slabs(scale_format, MASKED_M), in_slabs(scale_format, [1, 0, 0])
    assert bits(alone[0, :1]) == bits(full[0, :1])


@FORMATS
def test_rows_that_are_not_real_are_poison(scale_format):
    slabs = in_slabs(scale_format, MASKED_M)
    for expert, real in enumerate(MASKED_M):
        assert bool(slabs[expert, real:].isnan().all())


@FORMATS
def test_slabs_without_rows_make_slabs_of_the_right_shape(scale_format):
    slabs = in_slabs(scale_format, [0, 0, 0])
    assert (slabs.shape, slabs.dtype) == ((3, HEIGHT, N), torch.bfloat16)


def test_rows_behind_the_last_64_with_a_real_one_stay_unwritten():
    ones = torch.ones(1, HEIGHT, K, dtype=torch.bfloat16)
    matrix = TorchGemm().load(ExpertMatrix(values=drawn(2, 1, N, K), scale=None))
    counts = torch.tensor([65], dtype=torch.int32)
    is_number = ~TorchGemm().grouped_gemm_nt_masked(ones, None, matrix, counts)[0, :, 0].isnan()
    assert is_number.tolist() == [True] * 128 + [False] * 128
