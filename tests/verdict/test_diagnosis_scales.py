"""Laws of scales on tables of exponents: each names its own, and none the scales that are due."""

from dataclasses import replace

import pytest
import torch

from moe.quant.ue8m0 import pack_ue8m0, scale_from_exponent, unpack_ue8m0
from reports.verdict.diagnosis.content import Table
from reports.verdict.diagnosis.explanation import believed
from reports.verdict.diagnosis.scale_sides import ScaleSides
from reports.verdict.diagnosis.scales import laws_of
from reports.verdict.diagnosis.words import exponents
from reports.verdict.rows import Rows

ROWS, GROUPS = 6, 8


def due_exponents():
    """Every (row, block) has a neighbourhood of its own."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(110, 134, (ROWS, GROUPS), generator=generator)


def scale_of(exponent):
    return torch.exp2(exponent.double() - 127)


def sides_of(got, due, *, is_packed=True, source=None, unit=None):
    """Of all rows that are wrong; the others are right."""
    wrong = (got != due).any(1)
    rows = Rows.of_rank(0, len(due), torch.arange(10, 10 + len(due)))
    return ScaleSides(
        rows=rows[wrong],
        got=got[wrong],
        due=due[wrong],
        right=due[~wrong],
        is_packed=is_packed,
        num_words=-(-due.shape[1] // 4),
        unit=unit,
        source=source,
        donors=(Table(values=due, rows=rows),),
    )


def diagnosis_of(got, due, **more):
    return believed(list(laws_of(sides_of(got, due, **more))))


def said(found):
    return found.mistake, str(found.certainty)


def changed(due, at, value):
    other = due.clone()
    other[at] = value
    return other


@pytest.mark.parametrize(("step", "times"), [(-1, "0.5"), (1, "2"), (3, "8")])
def test_one_exponent_off_by_steps_is_named_by_how_much_and_where(step, times):
    due = scale_of(due_exponents())
    found = diagnosis_of(changed(due, (2, 1), due[2, 1] * 2.0**step), due)
    assert said(found) == ("scale_exponent", "low")  # of one scale there is always such a step
    assert f"off by {step:+d}, every wrong scale is {times} times what is due" in found.words
    assert "blocks 1 of token 12" in found.words


def test_two_scales_off_by_different_steps_have_no_step_in_common():
    due = scale_of(due_exponents())
    got = changed(changed(due, (2, 1), due[2, 1] * 2.0**30), (4, 6), due[4, 6] * 2.0**-7)
    assert diagnosis_of(got, due).mistake == "scale_form"


def test_single_scales_of_another_row_name_it():
    due = scale_of(due_exponents())
    blocks = [0, 2, 3, 5, 7]
    found = diagnosis_of(changed(due, (1, blocks), due[4, blocks]), due)
    assert found.mistake == "scale_donor"
    assert found.words.startswith("single scales of others: token 11 has those of token 14")


def test_rows_that_have_one_scale_in_common_prove_it_once():
    due = scale_of(due_exponents())[:1].expand(ROWS, GROUPS)
    explained = torch.ones(ROWS, dtype=torch.bool)
    once = sides_of(due * 8, due, unit=torch.zeros(ROWS, dtype=torch.int64)).bits_of(explained)
    assert sides_of(due * 8, due).bits_of(explained) == pytest.approx(ROWS * once)


def test_every_exponent_off_by_one_is_named():
    due = scale_of(due_exponents())
    assert said(diagnosis_of(due * 2, due)) == ("scale_exponent", "high")


def test_fp32_scales_rounded_up_are_late():
    due = scale_of(due_exponents()) * 1.3
    found = diagnosis_of(scale_of(due_exponents() + 1), due, is_packed=False)
    assert said(found) == ("scale_late", "high")
    assert "1.538 times what is due" in found.words


def test_fp32_scales_rounded_down_are_of_another_exponent():
    due = scale_of(due_exponents()) * 1.3
    found = diagnosis_of(scale_of(due_exponents()), due, is_packed=False)
    assert found.mistake == "scale_exponent"


@pytest.mark.parametrize("is_packed", [True, False])
def test_reciprocals_are_inverted_scales(is_packed):
    due = scale_of(due_exponents()) * (1.0 if is_packed else 1.3)
    got = (1 / due).float().double()
    found = diagnosis_of(got, due, is_packed=is_packed)
    assert said(found) == ("scale_form", "high")
    assert "reciprocal" in found.words


def read(words, groups=GROUPS):
    return scale_from_exponent(unpack_ue8m0(words, groups)).double()


def test_bits_of_fp32_numbers_are_named_as_another_form():
    due = due_exponents()
    as_fp32 = scale_from_exponent(due.to(torch.uint8))[:, : GROUPS // 4].contiguous()
    found = diagnosis_of(read(as_fp32.view(torch.int32)), scale_of(due))
    assert said(found) == ("scale_form", "high")
    assert "bits of fp32 numbers" in found.words


def test_words_packed_twice_are_named_as_another_form():
    due = due_exponents()
    words = pack_ue8m0(due.to(torch.uint8))
    again = torch.zeros_like(words)
    again[:, :1] = pack_ue8m0((words >> 23 & 0xFF).to(torch.uint8))
    found = diagnosis_of(read(again), scale_of(due))
    assert said(found) == ("scale_form", "high")
    assert "second time" in found.words


def test_the_scales_of_another_row_name_it():
    due = scale_of(due_exponents())
    found = diagnosis_of(changed(due, (1,), due[4]), due)
    assert said(found) == ("scale_donor", "high")
    assert "token 11 has those of token 14" in found.words


def test_the_scales_of_other_blocks_name_the_first():
    due = scale_of(due_exponents())
    found = diagnosis_of(changed(due, (3,), due[3].roll(-1)), due)
    assert said(found) == ("scale_donor", "high")
    assert "the scale of block 0 of token 13 is that of its block 1" in found.words


def test_one_scale_for_four_blocks_is_a_donor():
    due = scale_of(due_exponents())
    found = diagnosis_of(due[:, torch.arange(GROUPS) // 4 * 4], due)
    assert said(found) == ("scale_donor", "high")
    assert "first of 4" in found.words


def test_a_group_of_zeros_without_a_floor_is_named():
    due = scale_of(due_exponents())
    got = changed(due, (2, slice(None)), 2.0**-127)
    source = torch.ones(ROWS, GROUPS, dtype=torch.float64)
    source[0] = 0  # wrong rows stand first
    assert diagnosis_of(got, due, source=source).mistake == "scale_floor"


def test_scattered_powers_of_two_are_a_guess():
    due = scale_of(due_exponents())
    steps = torch.randint(-9, 9, due.shape, generator=torch.Generator().manual_seed(1))
    found = diagnosis_of(due * torch.exp2(steps.double()), due)
    assert said(found) == ("scale_form", "low")


def test_fp32_scales_that_are_nobodys_have_no_diagnosis():
    due = scale_of(due_exponents())
    odd = 1 + torch.rand(due.shape, generator=torch.Generator().manual_seed(1)).double()
    assert diagnosis_of(due * odd, due, is_packed=False) is None


def test_a_law_of_the_whole_tensor_needs_every_row():
    due = scale_of(due_exponents())
    got = changed(due, (2,), 1 / due[2])
    assert diagnosis_of(got, due).certainty == "low"


def test_right_scales_are_explained_by_nothing():
    due = scale_of(due_exponents())
    assert diagnosis_of(due, due) is None


def test_exponents_are_read_back():
    byte = torch.tensor([0, 1, 127, 254])
    assert exponents(scale_of(byte)).tolist() == [0, 1, 127, 254]
    assert exponents(torch.tensor([torch.nan]).double()).tolist() == [255]


@pytest.mark.parametrize(("first", "named"), [(10, False), (20, True)])
def test_a_donor_is_another_row(first, named):
    """Scales of the wire's table: of the same row there, or of one that is another token's."""
    due = scale_of(due_exponents())
    got = changed(due, 0, scale_of(due_exponents().flip(1))[0])
    sides = sides_of(got, due)
    wire = Table(values=got[:1], rows=Rows.of_rank(0, 1, torch.tensor([first])))
    laws = list(laws_of(replace(sides, donors=(*sides.donors, wire))))
    donors = [one for one in laws if one.words.startswith(("scales of others", "single scales"))]
    assert any(bool(one.explains.any()) for one in donors) is named
