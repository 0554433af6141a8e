"""Prepared weights of every recipe: their dtype, and the layout of their scales."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from tests.verdict.scale_runs import (
    BLOCKS,
    PACKED,
    Place,
    assert_row_major_is_found,
    only,
    scale_of,
    scale_run,
    values_of,
    with_byte,
    with_scale,
    with_values,
    without_scales,
)


def matrix(name: str) -> Place:
    return Stage.WEIGHTS, name


EVERY_MATRIX = pytest.mark.parametrize(
    "place",
    [matrix(f"{group}.{name}") for group in ("experts", "shared") for name in ("w13", "w2")],
    ids=lambda place: place[1],
)


@EVERY_MATRIX
@pytest.mark.parametrize(
    ("name", "wrong", "due"),
    [
        ("bf16", torch.float32, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float8_e4m3fn),
        ("ue8m0", torch.uint8, torch.float8_e4m3fn),
        ("per tensor", torch.bfloat16, torch.float8_e4m3fn),
        ("mxfp8", torch.uint8, torch.float8_e4m3fn),
        ("mxfp4 as fp8", torch.uint8, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_weights_of_another_dtype_are_found(name, wrong, due, place):
    run = scale_run(name)
    detail = only(with_values(run, place, values_of(run, place).to(wrong)), place)
    assert detail == f"stored as {wrong}; {due} is due"


@pytest.mark.parametrize(
    ("name", "due", "wrong"),
    [
        ("experts.w13", torch.uint8, torch.float8_e4m3fn),
        ("experts.w2", torch.uint8, torch.float8_e4m3fn),
        ("shared.w13", torch.float8_e4m3fn, torch.uint8),
        ("shared.w2", torch.float8_e4m3fn, torch.uint8),
    ],
    ids=str,
)
def test_fp4_is_of_the_routed_experts_alone(name, due, wrong):
    run, place = scale_run("mxfp4"), matrix(name)
    detail = only(with_values(run, place, values_of(run, place).view(wrong)), place)
    assert detail == f"stored as {wrong}; {due} is due"


@EVERY_MATRIX
@pytest.mark.parametrize(
    ("name", "scales"), [*((name, "fp32") for name in BLOCKS), *((n, "ue8m0") for n in PACKED)]
)
def test_quantised_weights_without_scales_are_found(name, scales, place):
    found = without_scales(scale_run(name), place)
    assert [(one.stage, one.tensor) for one in found] == [place, place]
    assert found[0].detail == f"with scales: False; scales are {scales}"


@EVERY_MATRIX
def test_bf16_weights_with_scales_are_found(place):
    detail = only(with_scale(scale_run("bf16"), place, torch.ones(1, 1, 1)), place)
    assert detail == "with scales: True; scales are none"


@EVERY_MATRIX
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda scale: scale.double(), id="dtype"),
        pytest.param(lambda scale: scale[:, :-1].contiguous(), id="rows"),
        pytest.param(lambda scale: scale[..., :1].contiguous(), id="columns"),
        pytest.param(lambda scale: scale.mT.contiguous().mT, id="strides"),
        pytest.param(lambda scale: scale[:, :1, :1, None], id="one for all"),
    ],
)
def test_block_scales_are_contiguous_fp32_one_for_128_by_128(
    change: Callable[[Tensor], Tensor], name, place
):
    run = scale_run(name)
    scale = scale_of(run, place)
    detail = only(with_scale(run, place, change(scale)), place)
    assert detail.endswith(f"; contiguous fp32 {list(scale.shape)} are due")


@EVERY_MATRIX
@pytest.mark.parametrize("name", PACKED)
def test_packed_scales_of_weights_have_to_be_mn_major(name, place):
    assert_row_major_is_found(name, place)


@pytest.mark.parametrize(
    ("name", "of_matrix", "words"),
    [
        ("ue8m0", "experts.w13", 1),
        ("mxfp8", "experts.w13", 2),
        ("mxfp8", "shared.w2", 2),
        ("mxfp4", "experts.w2", 2),
        ("mxfp4", "shared.w13", 1),
    ],
)
def test_a_row_of_weights_has_a_byte_for_each_of_its_groups(name, of_matrix, words):
    run, place = scale_run(name), matrix(of_matrix)
    scale = scale_of(run, place)
    other = mn_major(scale.repeat(1, 1, 2) if words == 1 else scale[..., :1])
    detail = only(with_scale(run, place, other), place)
    assert detail.endswith(f"; torch.int32 {[*scale.shape[:2], words]} are due")


@EVERY_MATRIX
def test_a_spare_byte_of_a_weights_scale_is_found(place):
    run = scale_run("ue8m0")
    detail = only(with_scale(run, place, with_byte(scale_of(run, place), 3, 2, 1)), place)
    assert detail.startswith("scale bytes past group 2 are not zero in 1 of ")


@EVERY_MATRIX
@pytest.mark.parametrize("name", PACKED)
def test_a_weights_scale_that_is_no_number_is_found(name, place):
    run = scale_run(name)
    detail = only(with_scale(run, place, with_byte(scale_of(run, place), 3, 1, 255)), place)
    assert detail == "scales of row 3 are no numbers; 1 such rows"
