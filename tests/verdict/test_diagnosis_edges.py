"""Ends of rows: a cell there proves nothing, whole ends do; padding is what the layer pads."""

import pytest
import torch

from moe.formats import Stage
from moe.poison import Fill, filled_with, poison
from reports.verdict.decode import codes_f64
from reports.verdict.diagnosis.edges import is_unwritten
from tests.verdict.diagnoses import diagnosed, named

RANK = 2
RECEIVED = (Stage.DISPATCH, RANK)
E4M3 = {0.0: 0, 1.5: 0x3C, 2.0: 0x40}
NUMBERS = 0x7F
"""Codes from here on are no numbers, or negative."""


def with_codes(run, change):
    """The diagnosis of received rows with codes changed in place."""
    codes = run.tensor(*RECEIVED, "hidden_states").view(torch.uint8).clone()
    change(codes)
    return diagnosed(run, *RECEIVED, {"hidden_states": codes.view(torch.float8_e4m3fn)})


@pytest.mark.parametrize("draw", range(12))
def test_one_random_code_in_the_last_column_is_no_kind_of_mistake(clean_ue8m0, draw):
    generator = torch.Generator().manual_seed(draw)
    code = int(torch.randint(NUMBERS, (), generator=generator))

    def change(codes):
        codes[5, -1] = code if codes[5, -1] != code else code ^ 1

    assert named(with_codes(clean_ue8m0, change)) == (None, "none")


def test_a_number_where_zero_is_due_leaks_from_no_padding_in_a_layer_without(clean_ue8m0):
    codes = clean_ue8m0.tensor(Stage.ACTIVATION, RANK, "hidden_states").view(torch.uint8).clone()
    held = [clean_ue8m0.route(RANK, number).row for number in range(26)]
    row, column = next((row, int(at)) for row in held for at in (codes[row] == 0).nonzero()[:, 0])
    codes[row, column] = E4M3[1.5]
    spoiled = codes.view(torch.float8_e4m3fn)
    found = diagnosed(clean_ue8m0, Stage.ACTIVATION, RANK, {"hidden_states": spoiled})
    assert named(found) == (None, "none")


def test_one_zero_at_the_end_of_a_row_is_no_tail(clean_ue8m0):
    def change(codes):
        codes[5, -1] = E4M3[0.0] if codes[5, -1] else E4M3[2.0]

    assert named(with_codes(clean_ue8m0, change)) == (None, "none")


def test_ends_of_zeros_in_two_rows_are_a_tail(clean_ue8m0):
    def change(codes):
        codes[5:7, -64:] = E4M3[0.0]

    found = with_codes(clean_ue8m0, change)
    assert named(found) == ("tail_columns", "high")
    assert found.words == "columns 192..255 are zero"


@pytest.mark.parametrize("fill", list(Fill))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_what_nobody_wrote_is_recognised_by_either_fill(dtype, fill):
    with filled_with(fill):
        rows = poison(torch.zeros(2, 4).to(dtype))
    values = codes_f64(rows) if dtype == torch.float8_e4m3fn else rows.double()
    assert is_unwritten(values).all()
    values[0, 1] = 1.0
    assert is_unwritten(values).tolist() == [False, True]
