"""DeepGEMM is called under the name that a release has, with what its kernels read."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe import deep_gemm
from moe.arithmetic import DEEP_GEMM_SM90, TENSOR_CORES
from moe.deep_gemm import DeepGemm, DeepGemmError
from moe.formats import ScaleFormat
from moe.weights import ExpertMatrix

ROWS, WIDTH, OUT = 8, 256, 128
CODES = torch.zeros(ROWS, WIDTH, dtype=torch.float8_e4m3fn)
SCALE = torch.ones(ROWS, 2)
WEIGHTS = ExpertMatrix(
    values=torch.zeros(3, OUT, WIDTH, dtype=torch.float8_e4m3fn), scale=torch.ones(3, 1, 2)
)
BF16 = ExpertMatrix(values=torch.zeros(3, OUT, WIDTH, dtype=torch.bfloat16), scale=None)


@pytest.fixture
def release(monkeypatch):
    """A library with some functions, each of which writes ones and keeps its arguments."""
    called = {}

    def with_functions(*names):
        def function(name):
            def kernel(lhs, rhs, out, *rest):
                called[name] = (lhs, rhs, rest)
                out.fill_(1)

            return kernel

        library = SimpleNamespace(__version__="0.1.2", **{name: function(name) for name in names})
        monkeypatch.setitem(sys.modules, "deep_gemm", library)
        deep_gemm._kernel.cache_clear()
        return called

    yield with_functions
    deep_gemm._kernel.cache_clear()


@pytest.mark.parametrize("name", ["fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"])
def test_slabs_are_multiplied_under_either_name(release, name):
    called = release(name)
    slabs, scale = CODES[None].expand(3, -1, -1), SCALE[None].expand(3, -1, -1)
    masked_m = torch.tensor([1, 0, 8], dtype=torch.int32)
    matrix = DeepGemm().load(WEIGHTS)
    out = DeepGemm().grouped_gemm_nt_masked(slabs, scale, matrix, masked_m)
    (_, _, rest) = called[name]
    assert out.shape == (3, ROWS, OUT)
    assert rest == (masked_m, ROWS)


def test_segments_take_scales_column_by_column(release):
    called = release("m_grouped_fp8_gemm_nt_contiguous")
    m_indices = torch.zeros(ROWS, dtype=torch.int32)
    DeepGemm().grouped_gemm_nt_contig(CODES, SCALE, DeepGemm().load(WEIGHTS), m_indices)
    (codes, scale), rhs, rest = called["m_grouped_fp8_gemm_nt_contiguous"]
    assert (codes is CODES, scale.stride()) == (True, (1, ROWS))
    assert (rhs[0] is WEIGHTS.values, rhs[1] is WEIGHTS.scale, rest) == (True, True, (m_indices,))


def test_bf16_rows_go_without_scales(release):
    called = release("m_grouped_bf16_gemm_nt_contiguous")
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    m_indices = torch.zeros(ROWS, dtype=torch.int32)
    DeepGemm().grouped_gemm_nt_contig(rows, None, DeepGemm().load(BF16), m_indices)
    assert called["m_grouped_bf16_gemm_nt_contiguous"][0] is rows


def test_the_dense_form_takes_the_first_expert(release):
    called = release("fp8_gemm_nt")
    DeepGemm().gemm_nt(CODES, SCALE, DeepGemm().load(WEIGHTS))
    values, scale = called["fp8_gemm_nt"][1]
    assert (values.shape, scale.shape) == ((OUT, WIDTH), (1, 2))


def test_no_kernel_is_started_for_no_rows(release):
    release()
    rows = CODES[:0]
    assert DeepGemm().gemm_nt(rows, SCALE[:0], DeepGemm().load(WEIGHTS)).shape == (0, OUT)


def test_what_the_kernel_leaves_is_poison(release, monkeypatch):
    release("fp8_gemm_nt")
    monkeypatch.setattr(sys.modules["deep_gemm"], "fp8_gemm_nt", lambda lhs, rhs, out: None)
    deep_gemm._kernel.cache_clear()
    assert DeepGemm().gemm_nt(CODES, SCALE, DeepGemm().load(WEIGHTS)).isnan().all()


def test_a_release_without_a_product_is_named(release):
    release("something_else")
    with pytest.raises(DeepGemmError, match=r"deep_gemm 0\.1\.2 has none of fp8_gemm_nt"):
        DeepGemm().gemm_nt(CODES, SCALE, DeepGemm().load(WEIGHTS))


def test_a_machine_without_the_library_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    deep_gemm._kernel.cache_clear()
    with pytest.raises(DeepGemmError, match="cannot be imported"):
        DeepGemm().gemm_nt(CODES, SCALE, DeepGemm().load(WEIGHTS))


@pytest.mark.parametrize(
    ("scale_format", "model"),
    [(ScaleFormat.FP32, DEEP_GEMM_SM90), (ScaleFormat.NONE, TENSOR_CORES)],
)
def test_what_it_declares_is_what_was_measured(scale_format, model):
    assert DeepGemm().arithmetic(scale_format) == model


def test_a_hint_of_how_many_rows_to_expect_is_passed_on(release):
    called = release("m_grouped_bf16_gemm_nt_masked")
    slabs, masked_m = torch.zeros(3, ROWS, WIDTH, dtype=torch.bfloat16), torch.tensor([1, 0, 8])
    gemm = DeepGemm(expected_m=3)
    gemm.grouped_gemm_nt_masked(slabs, None, gemm.load(BF16), masked_m)
    assert called["m_grouped_bf16_gemm_nt_masked"][2] == (masked_m, 3)
