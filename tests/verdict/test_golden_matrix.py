"""Weight matrices of every recipe: what a checkpoint stores, and what a GEMM should read."""

import pytest
import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import shared_recipe
from moe.weights import ExpertMatrix
from reports.verdict import golden_matrix
from reports.verdict.golden_matrix import prepared_matrix, stored_matrix

FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0
BOTH = pytest.mark.parametrize("scale_format", [FP32, UE8M0])


def bf16(*values: float, columns: int = 32) -> ExpertMatrix:
    """One row: the values, then zeros."""
    row = torch.zeros(1, 1, columns, dtype=torch.bfloat16)
    row[0, 0, : len(values)] = torch.tensor(values)
    return ExpertMatrix(values=row, scale=None)


def e4m3(rows: int, columns: int, cells: dict[tuple[int, int], float]) -> Tensor:
    """[1, rows, columns] e4m3 zeros but for some cells."""
    values = torch.zeros(1, rows, columns)
    for (row, column), value in cells.items():
        values[0, row, column] = value
    return values.to(torch.float8_e4m3fn)


def in_blocks(scale: float) -> ExpertMatrix:
    """A block whose scale is given, beside one with scale 1."""
    values = e4m3(1, 256, {(0, 0): 448.0, (0, 1): 8.0, (0, 2): 9.0, (0, 128): 7.0})
    return ExpertMatrix(values=values, scale=torch.tensor([[[scale, 1.0]]]))


def by_part(*scales: float) -> ExpertMatrix:
    """A row of gate, a row of up, a scale for each or one for both."""
    values = e4m3(2, 32, {(0, 0): 448.0, (0, 1): 2.0**-9, (1, 0): 3.0, (1, 1): 2.0**-9})
    return ExpertMatrix(values=values, scale=torch.tensor([scales]))


def mx(values: Tensor, *bytes_: int) -> ExpertMatrix:
    return ExpertMatrix(
        values=values, scale=torch.tensor([[bytes_]], dtype=torch.uint8), group_size=32
    )


def mxfp8() -> ExpertMatrix:
    """Two groups with scales 1/2 and 8."""
    return mx(e4m3(1, 64, {(0, 0): 448.0, (0, 31): 1.0, (0, 32): -9.0}), 126, 130)


def mxfp4(*bytes_: int) -> ExpertMatrix:
    """Groups of 0.5, 6 and zeros."""
    packed = torch.zeros(1, 1, 16 * len(bytes_), dtype=torch.uint8)
    packed[..., ::16] = 0x71
    return mx(packed, *bytes_)


def prepared(matrix: ExpertMatrix, recipe: str, scale_format: ScaleFormat) -> Tensor:
    return prepared_matrix(matrix, QuantRecipe(recipe), scale_format)


# As stored.


def test_a_stored_bf16_matrix_is_its_values():
    assert stored_matrix(bf16(1.5, -2.0))[0, :3].tolist() == [1.5, -2.0, 0.0]


def test_a_stored_block_is_its_codes_times_its_scale():
    assert stored_matrix(in_blocks(1.5))[0, [0, 1, 2, 128]].tolist() == [672.0, 12.0, 13.5, 7.0]


def test_a_stored_part_is_its_codes_times_its_scale():
    got = stored_matrix(by_part(1.0, 0.5))
    assert got[:, :2].tolist() == [[448.0, 2.0**-9], [1.5, 2.0**-10]]


def test_one_scale_is_for_all_rows():
    assert stored_matrix(by_part(3.0))[:, 0].tolist() == [1344.0, 9.0]


def test_a_stored_group_of_mxfp8_is_its_codes_times_its_power_of_two():
    assert stored_matrix(mxfp8())[0, [0, 31, 32, 33]].tolist() == [224.0, 0.5, -72.0, 0.0]


def test_a_stored_group_of_mxfp4_is_its_codes_times_its_power_of_two():
    got = stored_matrix(mxfp4(126, 130))
    assert got.shape == (1, 64)
    assert got[0, [0, 1, 2, 32, 33]].tolist() == [0.25, 3.0, 0.0, 4.0, 48.0]


def test_a_byte_of_255_is_no_number_in_its_own_group():
    got = stored_matrix(mxfp4(255, 127))[0].isnan()
    assert (got[:32].all(), got[32:].any()) == (True, False)


# As the GEMMs read it.


@BOTH
def test_bf16_is_kept(scale_format):
    assert torch.equal(prepared(bf16(1.5), "bf16", scale_format), stored_matrix(bf16(1.5)))


def test_blocks_with_fp32_scales_are_kept():
    want = stored_matrix(in_blocks(1.5))
    assert torch.equal(prepared(in_blocks(1.5), "fp8_block128", FP32), want)


def test_blocks_are_rounded_again_under_a_power_of_two():
    """Scale 2: 672 / 2 = 336 and 13.5 / 2 = 6.75 are ties, and go to the even 320 and 7."""
    got = prepared(in_blocks(1.5), "fp8_block128", UE8M0)
    assert got[0, [0, 1, 2, 128]].tolist() == [640.0, 12.0, 14.0, 7.0]


def test_a_block_that_has_a_power_of_two_already_is_not_changed():
    want = stored_matrix(in_blocks(0.25))
    assert torch.equal(prepared(in_blocks(0.25), "fp8_block128", UE8M0), want)


@BOTH
def test_parts_are_brought_under_the_largest_scale(scale_format):
    """Half of the smallest code is a tie, and goes to zero."""
    got = prepared(by_part(1.0, 0.5), "fp8_per_tensor", scale_format)
    assert got[:, :2].tolist() == [[448.0, 2.0**-9], [1.5, 0.0]]


@BOTH
def test_a_lone_scale_changes_no_code(scale_format):
    got = prepared(by_part(0.3), "fp8_per_tensor", scale_format)
    assert torch.equal(got, stored_matrix(by_part(0.3)))


@BOTH
def test_mxfp8_is_kept(scale_format):
    assert torch.equal(prepared(mxfp8(), "mxfp8", scale_format), stored_matrix(mxfp8()))


@BOTH
def test_a_bf16_checkpoint_of_mxfp8_is_rounded_once(scale_format):
    """Scale 2: 450 / 2 = 225 goes to 224, 17 / 2 = 8.5 to the even 8."""
    got = prepared(bf16(450.0, 17.0, 3.0), "mxfp8", scale_format)
    assert got[0, :4].tolist() == [448.0, 16.0, 3.0, 0.0]


@BOTH
def test_mxfp4_is_kept(scale_format):
    matrix = mxfp4(126, 130)
    assert torch.equal(prepared(matrix, "mxfp4_w4a8", scale_format), stored_matrix(matrix))


@BOTH
@pytest.mark.parametrize("lower", [0, 1, 14])
def test_mxfp4_as_fp8_keeps_what_fits_in_a_block(lower, scale_format):
    matrix = mxfp4(127, 127 - lower)
    assert torch.equal(prepared(matrix, "mxfp4_as_fp8", scale_format), stored_matrix(matrix))


@BOTH
@pytest.mark.parametrize(
    ("lower", "half", "six"),
    [(15, 0.0, 6 * 2.0**-15), (17, 0.0, 8 * 2.0**-17), (19, 0.0, 0.0)],
)
def test_mxfp4_as_fp8_rounds_what_does_not(lower, half, six, scale_format):
    """In units of the block's scale, 2^-10 is a tie to zero, 6 * 2^-11 one to 2^-8."""
    got = prepared(mxfp4(127, 127 - lower), "mxfp4_as_fp8", scale_format)
    assert got[0, [1, 32, 33]].tolist() == [6.0, half, six]


def test_another_block_is_not_a_groups_business():
    matrix = mxfp4(127, 127, 127, 127, 100)
    assert torch.equal(prepared(matrix, "mxfp4_as_fp8", FP32), stored_matrix(matrix))


@pytest.mark.parametrize(
    ("recipe", "due"),
    [
        ("bf16", "bf16"),
        ("fp8_block128", "fp8_block128"),
        ("fp8_per_tensor", "fp8_per_tensor"),
        ("mxfp8", "mxfp8"),
        ("mxfp4_w4a8", "fp8_block128"),
        ("mxfp4_as_fp8", "fp8_block128"),
    ],
)
def test_the_shared_expert_has_a_recipe(recipe, due):
    assert shared_recipe(QuantRecipe(recipe)) == due


# Some blocks of rows at a time.


def rows_of_blocks() -> ExpertMatrix:
    """300 rows of 8, with scales 1, 3/4 and 5 of their blocks."""
    values = torch.full((1, 300, 128), 8.0).to(torch.float8_e4m3fn)
    return ExpertMatrix(values=values, scale=torch.tensor([[[1.0], [0.75], [5.0]]]))


@pytest.mark.parametrize("bytes_at_once", [1, 2 * 128 * 128 * 8], ids=["one block", "two blocks"])
@BOTH
def test_each_run_of_rows_has_its_own_scales(bytes_at_once, scale_format, monkeypatch):
    monkeypatch.setattr(golden_matrix, "BYTES_AT_ONCE", bytes_at_once)
    matrix = prepared(rows_of_blocks(), "fp8_block128", scale_format)
    assert matrix.shape == (300, 128)
    assert matrix.unique_consecutive(dim=0)[:, 0].tolist() == [8.0, 6.0, 40.0]
    assert matrix[[127, 128, 255, 256], 0].tolist() == [8.0, 6.0, 6.0, 40.0]
