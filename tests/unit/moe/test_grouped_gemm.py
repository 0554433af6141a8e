"""The reference GEMM: right within its declared error, and rows that depend on nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import moe.grouped_gemm as module
from moe.formats import ScaleFormat
from moe.golden import decode_e4m3, round_bf16, unpack_ue8m0
from moe.grouped_gemm import TorchGemm, matmul_nt
from moe.quant.fp8 import quantize_blocks, quantize_groups
from moe.weight_preparation import requantize_ue8m0
from moe.weights import ExpertMatrix

EXPERTS, N, K = 3, 192, 256
FORMATS = pytest.mark.parametrize(
    "scale_format", [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operands:
    """lhs [M, K] with its scale, and [L, N, K] weights."""

    lhs: Tensor
    lhs_scale: Tensor | None
    matrix: ExpertMatrix

    def first(self, num_rows: int) -> "Operands":
        scale = None if self.lhs_scale is None else self.lhs_scale[:num_rows]
        return Operands(lhs=self.lhs[:num_rows], lhs_scale=scale, matrix=self.matrix)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def operands(scale_format: ScaleFormat, m: int, n: int = N, k: int = K) -> Operands:
    rows, weights = drawn(1, m, k), drawn(2, EXPERTS, n, k)
    if scale_format is ScaleFormat.NONE:
        matrix = ExpertMatrix(values=weights, scale=None)
        return Operands(lhs=rows, lhs_scale=None, matrix=matrix)
    quantized = quantize_groups(rows, scale_format)
    blocks = quantize_blocks(weights, ScaleFormat.FP32)
    matrix = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    if scale_format is ScaleFormat.UE8M0:
        matrix = requantize_ue8m0(matrix)
    return Operands(lhs=quantized.values, lhs_scale=quantized.scale, matrix=matrix)


def multiply(given: Operands, m_indices: list[int]) -> Tensor:
    gemm = TorchGemm()
    indices = torch.tensor(m_indices, dtype=torch.int32)
    loaded = gemm.load(given.matrix)
    return gemm.grouped_gemm_nt_contig(given.lhs, given.lhs_scale, loaded, indices)


def exact_operands(given: Operands) -> tuple[Tensor, Tensor]:
    """[M, K] and [L, N, K] float64, decoded by the golden model's number formats."""
    if given.matrix.scale is None or given.lhs_scale is None:
        return given.lhs.to(torch.float64), given.matrix.values.to(torch.float64)
    lhs = decode_e4m3(given.lhs.view(torch.uint8))
    rhs = decode_e4m3(given.matrix.values.view(torch.uint8))
    groups = lhs.shape[1] // 128
    if given.lhs_scale.dtype == torch.int32:
        lhs_scale = unpack_ue8m0(given.lhs_scale, groups)
        rhs_scale = unpack_ue8m0(given.matrix.scale, groups)
    else:
        lhs_scale = given.lhs_scale.to(torch.float64)
        by_row = given.matrix.scale.repeat_interleave(128, dim=1)[:, : rhs.shape[1]]
        rhs_scale = by_row.to(torch.float64)
    return lhs * lhs_scale.repeat_interleave(128, -1), rhs * rhs_scale.repeat_interleave(128, -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@FORMATS
def test_results_lie_within_the_declared_error_of_float64(scale_format):
    given = operands(scale_format, m=96)
    experts = [0] * 32 + [2] * 64
    lhs, rhs = exact_operands(given)
    exact = torch.einsum("mk,mnk->mn", lhs, rhs[experts])
    magnitude = torch.einsum("mk,mnk->mn", lhs.abs(), rhs[experts].abs())
    noise = TorchGemm().arithmetic(scale_format).sum_error(K) * magnitude
    got = multiply(given, experts).to(torch.float64)
    # Rounding is monotone: what lies within the noise rounds to between its rounded ends.
    assert bool((got >= round_bf16(exact - noise)).all())
    assert bool((got <= round_bf16(exact + noise)).all())


def test_fp32_sums_lie_within_the_declared_error_of_float64():
    lhs, rhs = drawn(3, 70, 512).to(torch.float32), drawn(4, 90, 512).to(torch.float32)
    exact = lhs.to(torch.float64) @ rhs.to(torch.float64).t()
    magnitude = lhs.abs().to(torch.float64) @ rhs.abs().to(torch.float64).t()
    bound = TorchGemm().arithmetic(ScaleFormat.NONE).sum_error(512) * magnitude
    assert bool(((matmul_nt(lhs, rhs).to(torch.float64) - exact).abs() <= bound).all())


@pytest.mark.parametrize("k", [64, 256, 640])
def test_fp32_sums_of_a_row_have_the_same_bits_for_every_number_of_rows(k):
    lhs, rhs = drawn(5, 130, k).to(torch.float32), drawn(6, N, k).to(torch.float32)
    whole = matmul_nt(lhs, rhs)
    for m in range(1, 131):
        assert torch.equal(matmul_nt(lhs[:m], rhs), whole[:m]), m


@FORMATS
def test_a_row_has_the_same_bits_for_every_number_of_rows(scale_format):
    given = operands(scale_format, m=130, k=384)
    loaded = TorchGemm().load(given.matrix)
    whole = TorchGemm().gemm_nt(given.lhs, given.lhs_scale, loaded)
    for m in range(1, 131):
        few = given.first(m)
        assert same_bits(TorchGemm().gemm_nt(few.lhs, few.lhs_scale, loaded), whole[:m]), m


@FORMATS
@pytest.mark.parametrize("m", [2, 13, 64, 65, 130])
def test_a_row_has_the_same_bits_beside_rows_of_nan(scale_format, m):
    given = operands(scale_format, m=m)
    expected = multiply(given, [1] * m)[m // 2]
    others = [row for row in range(m) if row != m // 2]
    poisoned = given.lhs.clone()
    if poisoned.dtype == torch.bfloat16:
        poisoned[others] = torch.nan
    else:
        poisoned.view(torch.uint8)[others] = 0x7F
    neighboured = Operands(lhs=poisoned, lhs_scale=given.lhs_scale, matrix=given.matrix)
    assert same_bits(multiply(neighboured, [1] * m)[m // 2], expected)


@FORMATS
@pytest.mark.parametrize("unlike", [None, "row", "scale"])
def test_equal_rows_at_a_segments_end_have_the_bits_of_each_alone(scale_format, unlike):
    given = operands(scale_format, 192)
    words = given.lhs.view(torch.uint8)
    words[20:128] = words[19]
    scale = given.lhs_scale
    if scale is not None:
        scale[20:128] = scale[19].clone()
    if unlike == "row":
        words[90] = words[3]
    if unlike == "scale" and scale is not None:
        scale[90] = scale[3]
    together = multiply(given, [0] * 128 + [2] * 64)
    for row in (5, 19, 20, 89, 90, 91, 127, 150):
        row_scale = None if scale is None else scale[row : row + 1]
        alone = Operands(lhs=given.lhs[row : row + 1], lhs_scale=row_scale, matrix=given.matrix)
        assert same_bits(multiply(alone, [0 if row < 128 else 2]), together[row : row + 1])


def test_equal_rows_at_a_segments_end_are_multiplied_once(monkeypatch):
    given = operands(ScaleFormat.NONE, 128)
    given.lhs[20:] = given.lhs[19]
    multiplied, product = [], module._multiply

    def counted(rows: Tensor, *given: object, **named: object) -> None:
        multiplied.append(len(rows))
        product(rows, *given, **named)

    monkeypatch.setattr(module, "_multiply", counted)
    multiply(given, [1] * 128)
    assert multiplied == [20]


@FORMATS
def test_a_row_has_the_same_bits_in_any_segment(scale_format):
    given = operands(scale_format, m=40)
    alone = multiply(given, [2] * 40)
    between = multiply(given, [0] * 7 + [2] * 3 + [1] * 30)
    assert same_bits(between[7:10], alone[7:10])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [64, 256])
@FORMATS
def test_one_and_two_threads_give_the_same_bits(scale_format, num_rows, threads):
    given = operands(scale_format, m=num_rows, n=512, k=1024)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(multiply(given, [1] * num_rows))
    assert same_bits(*results)


@FORMATS
def test_a_long_sum_has_the_same_bits_among_few_rows_and_many(scale_format):
    given = operands(scale_format, m=256, n=512, k=1024)
    assert same_bits(multiply(given.first(64), [1] * 64), multiply(given, [1] * 256)[:64])


@FORMATS
def test_cached_and_converted_weights_give_the_same_bits(scale_format, monkeypatch):
    given = operands(scale_format, m=50)
    cached = multiply(given, [0] * 20 + [2] * 30)
    monkeypatch.setattr(module, "CACHED_MATRIX_BYTES", 0)
    assert TorchGemm().load(given.matrix).as_fp32 is None
    assert same_bits(multiply(given, [0] * 20 + [2] * 30), cached)


@FORMATS
def test_rows_of_no_expert_stay_unwritten(scale_format):
    given = operands(scale_format, m=10)
    out = multiply(given, [0] * 3 + [-1] * 4 + [1] * 3)
    assert bool(out[3:7].isnan().all())
    assert not bool(out[[0, 1, 2, 7, 8, 9]].isnan().any())


@FORMATS
def test_the_dense_form_uses_the_only_expert(scale_format):
    given = operands(scale_format, m=20)
    gemm = TorchGemm()
    dense = gemm.gemm_nt(given.lhs, given.lhs_scale, gemm.load(given.matrix))
    assert same_bits(dense, multiply(given, [0] * 20))


@FORMATS
def test_no_rows_make_an_empty_bf16_result(scale_format):
    out = multiply(operands(scale_format, m=5).first(0), [])
    assert (out.shape, out.dtype) == ((0, N), torch.bfloat16)


def test_a_weight_whose_rows_end_inside_a_block_is_scaled_to_its_edge():
    scale = torch.tensor([[[1.0], [4.0]]]).repeat(EXPERTS, 1, 1)
    ones = torch.ones(EXPERTS, 130, 128).to(torch.float8_e4m3fn)
    rows = torch.ones(4, 128).to(torch.float8_e4m3fn)
    edged = Operands(
        lhs=rows,
        lhs_scale=torch.ones(4, 1),
        matrix=ExpertMatrix(values=ones, scale=scale),
    )
    assert multiply(edged, [1] * 4)[0, [0, 127, 128, 129]].tolist() == [128, 128, 512, 512]


def test_scales_on_one_side_only_are_refused():
    quantized, plain = operands(ScaleFormat.FP32, m=4), operands(ScaleFormat.NONE, m=4)
    mixed = Operands(lhs=plain.lhs, lhs_scale=None, matrix=quantized.matrix)
    with pytest.raises(ValueError, match="one operand only is quantised"):
        multiply(mixed, [0] * 4)


def test_the_result_knows_its_columns_before_it_is_computed():
    assert TorchGemm().load(operands(ScaleFormat.NONE, m=1).matrix).out_features == N
