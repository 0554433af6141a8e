"""Scales of rows at each boundary: dtypes, strides, spare bytes, and bytes that are no number."""

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major, row_major
from reports.verdict.scale_contracts import bytes_problem
from tests.verdict.clean_runs import CleanRun
from tests.verdict.scale_runs import (
    PACKED,
    RANK,
    RUNS,
    Place,
    assert_row_major_is_found,
    deviations,
    only,
    scale_of,
    scale_run,
    values_of,
    with_byte,
    with_scale,
    with_values,
    without_scales,
)

RECEIVED = (Stage.DISPATCH, "hidden_states")
GROUPED = (Stage.PRE_PERMUTE, "rows.hidden_states")
ACTIVATION = (Stage.ACTIVATION, "hidden_states")
SHARED_INPUT = (Stage.TAIL, "shared.input")
SHARED_MIDDLE = (Stage.TAIL, "shared.hidden_states")
BEHIND_DISPATCH = [GROUPED, ACTIVATION, SHARED_INPUT, SHARED_MIDDLE]
EVERY_PLACE = pytest.mark.parametrize("place", [RECEIVED, *BEHIND_DISPATCH], ids=" ".join)
BEHIND = pytest.mark.parametrize("place", BEHIND_DISPATCH, ids=" ".join)


def row_of_a_route(run: CleanRun, place: Place) -> int:
    return run.route(RANK).row if place in (GROUPED, ACTIVATION) else 0


def row_of_padding(run: CleanRun) -> int:
    """The last row of the first segment."""
    padding = run.route(RANK).row + 127
    assert padding not in run.tensor(Stage.PRE_PERMUTE, RANK, "rows.live_rows")
    return padding


def named(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", RUNS)
def test_a_clean_run_keeps_every_promise(name):
    run = scale_run(name)
    assert deviations(run, run.traces) == []


# Which dtypes and shapes.


@BEHIND
def test_codes_where_nothing_is_quantised_are_found(place):
    run = scale_run("bf16")
    codes = values_of(run, place).to(torch.float8_e4m3fn)
    detail = only(with_values(run, place, codes), place)
    assert detail == "torch.float8_e4m3fn with scales: False; bf16 is due"


@BEHIND
def test_scales_where_nothing_is_quantised_are_found(place):
    detail = only(with_scale(scale_run("bf16"), place, torch.ones(1, 1)), place)
    assert detail == "torch.bfloat16 with scales: True; bf16 is due"


@EVERY_PLACE
@pytest.mark.parametrize("name", ["fp32", "mxfp8"])
def test_bf16_rows_of_a_recipe_that_quantises_are_found(name, place):
    run = scale_run(name)
    rows = values_of(run, place).to(torch.bfloat16)
    detail = only(with_values(run, place, rows), place)
    assert detail == "torch.bfloat16 with scales: True; e4m3 with scales is due"


@EVERY_PLACE
def test_codes_without_scales_are_found_on_every_rank(place):
    found = without_scales(scale_run("fp32"), place)
    assert [(one.stage, one.tensor) for one in found] == [place, place]
    assert found[0].detail == ("torch.float8_e4m3fn with scales: False; e4m3 with scales is due")


@EVERY_PLACE
def test_fp32_scales_where_bytes_are_due_are_found(place):
    run = scale_run("ue8m0")
    rows = len(scale_of(run, place))
    detail = only(with_scale(run, place, torch.ones(rows, 2)), place)
    assert detail == f"scales torch.float32 [{rows}, 2]; torch.int32 [{rows}, 1] are due"


@EVERY_PLACE
def test_scales_that_are_no_powers_of_two_are_counted(place):
    run = scale_run("ue8m0")
    scale = torch.ones(len(scale_of(run, place)), 2)
    scale[row_of_a_route(run, place)] = torch.tensor([0.3, -2.0])
    detail = only(with_scale(run, place, scale), place)
    assert detail.endswith(" are due; 2 of them are no powers of two")


@pytest.mark.parametrize("place", [GROUPED, ACTIVATION], ids=" ".join)
def test_scales_of_padding_are_not_counted(place):
    run = scale_run("ue8m0")
    scale = torch.ones(len(scale_of(run, place)), 2)
    scale[row_of_padding(run)] = 0.3
    assert only(with_scale(run, place, scale), place).endswith(" are due")


@EVERY_PLACE
def test_words_where_fp32_scales_are_due_are_found(place):
    run = scale_run("fp32")
    rows = len(scale_of(run, place))
    words = mn_major(torch.zeros(rows, 1, dtype=torch.int32))
    detail = only(with_scale(run, place, words), place)
    assert detail == f"scales torch.int32 [{rows}, 1]; torch.float32 [{rows}, 2] are due"


@EVERY_PLACE
def test_scales_of_another_precision_are_found(place):
    run = scale_run("fp32")
    scale = scale_of(run, place)
    shape = list(scale.shape)
    detail = only(with_scale(run, place, scale.double()), place)
    assert detail == f"scales torch.float64 {shape}; torch.float32 {shape} are due"


@EVERY_PLACE
def test_scales_of_too_few_groups_are_found(place):
    run = scale_run("fp32")
    rows = len(scale_of(run, place))
    detail = only(with_scale(run, place, torch.ones(rows, 1)), place)
    assert detail == f"scales torch.float32 [{rows}, 1]; torch.float32 [{rows}, 2] are due"


@pytest.mark.parametrize(
    ("place", "words"),
    [(RECEIVED, 1), (GROUPED, 1), (ACTIVATION, 2), (SHARED_INPUT, 2), (SHARED_MIDDLE, 2)],
    ids=named,
)
def test_groups_of_mxfp8_are_of_32_but_on_the_wire(place, words):
    run = scale_run("mxfp8")
    scale = scale_of(run, place)
    other = mn_major(scale.repeat(1, 2) if words == 1 else scale[:, :1])
    detail = only(with_scale(run, place, other), place)
    assert detail.endswith(f"; torch.int32 [{len(scale)}, {words}] are due")


# Strides.


@EVERY_PLACE
@pytest.mark.parametrize("name", PACKED)
def test_packed_scales_have_to_be_mn_major(name, place):
    assert_row_major_is_found(name, place)


@EVERY_PLACE
@pytest.mark.parametrize("off", [-1, 1])
def test_a_column_of_words_takes_whole_16_bytes(place, off):
    """One word less or more than the rows, rounded up to fours."""
    run = scale_run("ue8m0")
    scale = scale_of(run, place)
    due = -(-len(scale) // 4) * 4
    other = scale.new_zeros(due + off + 1).as_strided(scale.shape, (1, due + off)).copy_(scale)
    detail = only(with_scale(run, place, other), place)
    assert detail == f"scale strides (1, {due + off}); MN-major (1, {due}) are due"


@pytest.mark.parametrize(
    ("name", "place", "due"),
    [
        ("fp32", RECEIVED, "row-major"),
        ("fp32", GROUPED, "row-major"),
        ("fp32", ACTIVATION, "MN-major"),
        ("fp32", SHARED_INPUT, "MN-major"),
        ("fp32", SHARED_MIDDLE, "MN-major"),
        ("slabs", RECEIVED, "MN-major"),
        ("slabs", GROUPED, "MN-major"),
        ("slabs", ACTIVATION, "MN-major"),
        ("slabs sm120", RECEIVED, "MN-major"),
        ("slabs, bf16 wire", GROUPED, "row-major"),
    ],
    ids=named,
)
def test_fp32_scales_lie_as_their_reader_wants_them(name, place, due):
    run = scale_run(name)
    scale = scale_of(run, place)
    turned = row_major(scale) if due == "MN-major" else mn_major(scale)
    assert f"; {due} (" in only(with_scale(run, place, turned), place)


# Bytes of packed words.


@EVERY_PLACE
@pytest.mark.parametrize("byte", [2, 3])
def test_a_spare_byte_that_is_not_zero_is_found(place, byte):
    run = scale_run("ue8m0")
    scale = with_byte(scale_of(run, place), row_of_a_route(run, place), byte, 127)
    detail = only(with_scale(run, place, scale), place)
    assert detail.startswith("scale bytes past group 2 are not zero in 1 of ")


@EVERY_PLACE
@pytest.mark.parametrize("byte", [0, 1])
def test_a_scale_that_is_no_number_is_found(place, byte):
    run = scale_run("ue8m0")
    scale = with_byte(scale_of(run, place), row_of_a_route(run, place), byte, 255)
    detail = only(with_scale(run, place, scale), place)
    assert detail.endswith(" are no numbers; 1 such rows")


@pytest.mark.parametrize("place", [GROUPED, ACTIVATION], ids=" ".join)
def test_bytes_of_padding_are_nobodys_business(place):
    run = scale_run("ue8m0")
    padding = row_of_padding(run)
    no_number = with_byte(scale_of(run, place), padding, 0, 255)
    assert with_scale(run, place, with_byte(no_number, padding, 3, 9)) == []


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_row_that_overflowed_before_its_quantiser_may_have_no_number(value):
    run = scale_run("ue8m0")
    row = run.route(RANK).row
    source = run.tensor(Stage.ACTIVATION, RANK, "activation").clone()
    source[row, 0] = float(value)
    scale = with_byte(scale_of(run, ACTIVATION), row, 0, 255)
    changed = {"activation": source, "hidden_states_scale": scale}
    assert deviations(run, run.changed(Stage.ACTIVATION, RANK, changed)) == []


def packed(*rows: tuple[int, int, int, int]) -> Tensor:
    """[R, 1] int32, the first byte lowest."""
    return torch.tensor(rows, dtype=torch.uint8).view(-1, 4).view(torch.int32)


@pytest.mark.parametrize(
    ("rows", "groups", "problem"),
    [
        ([(0, 254, 0, 0)], 2, None),
        ([(1, 2, 3, 4)], 4, None),
        ([(1, 2, 3, 0), (1, 2, 9, 0)], 2, "scale bytes past group 2 are not zero in 2 of 2 rows"),
        ([(1, 2, 0, 0), (1, 2, 0, 255)], 2, "scale bytes past group 2 are not zero in 1 of 2 rows"),
        ([(1, 2, 0, 0), (255, 2, 0, 0)], 2, "scales of row 1 are no numbers; 1 such rows"),
        ([(255, 255, 0, 0), (1, 255, 0, 0)], 2, "scales of row 0 are no numbers; 2 such rows"),
        ([], 2, None),
    ],
    ids=["least and most", "none spare", "third", "fourth", "255", "two rows", "no rows"],
)
def test_packed_bytes_are_exponents_and_spare_zeros(rows, groups, problem):
    assert bytes_problem(packed(*rows), groups) == problem


def test_a_finite_row_beside_one_that_overflowed_still_needs_a_number():
    source = torch.tensor([[1.0, torch.inf], [1.0, 2.0]])
    problem = bytes_problem(packed((1, 255, 0, 0), (1, 255, 0, 0)), 2, source)
    assert problem == "scales of row 1 are no numbers; 1 such rows"
