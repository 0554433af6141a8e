"""What the note says of a quantiser that went wrong: size, late rounding, exponent, donor."""

import torch

from moe.formats import ScaleFormat
from moe.golden import Quantized, quantize_groups, round_e4m3
from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows

TOKENS, BLOCKS = 6, 4
PLACES = torch.arange(TOKENS)


def quantised() -> Quantized:
    """Rows whose every (row, block) has an exponent of its own."""
    rows = torch.randn(TOKENS, BLOCKS * 128, generator=torch.Generator().manual_seed(0))
    powers = torch.exp2(torch.arange(TOKENS * BLOCKS, dtype=torch.float64))
    spread = rows.double().view(TOKENS, BLOCKS, 128) * powers.view(TOKENS, BLOCKS, 1)
    return quantize_groups(spread.view(TOKENS, -1), ScaleFormat.UE8M0)


def note(want: Quantized, *, codes=None, scale=None) -> str:
    codes = want.codes if codes is None else codes
    scale = want.scale if scale is None else scale
    differs = (codes != want.codes).view(TOKENS, BLOCKS, 128).any(-1) | (scale != want.scale)
    rows = Rows.of_rank(0, TOKENS, torch.arange(10, 10 + TOKENS))
    return QuantiserNote(rows=rows, codes=codes, scale=scale, want=want, is_wrong=differs)(PLACES)


def changed(scale: torch.Tensor, at: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    other = scale.clone()
    other[at] = value
    return other


def test_nothing_is_said_of_what_is_right():
    assert note(quantised()) == ""


def test_a_halved_scale_is_sized_and_named_by_its_factor():
    want = quantised()
    words = note(want, scale=changed(want.scale, (2, 1), want.scale[2, 1] / 2))
    assert words.startswith("wrong groups: 1, 0.4988 times their size on average")
    assert "every wrong scale is 0.5 times what is due" in words


def test_scales_rounded_up_after_quantising_are_named_and_sized():
    want = quantised()
    grouped = want.scaled.view(TOKENS, BLOCKS, 128)
    exact = round_e4m3(grouped * 448.0 / grouped.abs().amax(-1, keepdim=True))
    words = note(want, codes=exact.view(TOKENS, -1))
    true_factor = (448.0 / grouped.abs().amax(-1)).mean()
    assert f"{float(true_factor):.2f}" in words
    assert words.endswith("the codes are those of the scale before it was rounded up")


def test_the_scales_of_another_row_name_it():
    want = quantised()
    words = note(want, scale=changed(want.scale, (1,), want.scale[4]))
    assert "the scales of token 11 are those of token 14" in words


def test_the_scales_of_other_blocks_name_the_first():
    want = quantised()
    words = note(want, scale=changed(want.scale, (3,), want.scale[3].roll(-1)))
    assert "the scale of block 0 of token 13 is that of its block 1" in words


def test_a_row_whose_scales_are_nobodys_has_no_donor():
    want = quantised()
    words = note(want, scale=changed(want.scale, (3,), want.scale[3] * 3))
    assert "those of" not in words
    assert "that of" not in words


def test_rows_of_another_rank_are_no_donors():
    want = quantised()
    scale = changed(want.scale, (1,), want.scale[4])
    rank = torch.tensor([0, 0, 0, 0, 1, 0])
    rows = Rows(rank=rank, token=PLACES, slot=PLACES, expert=PLACES)
    wrong = scale != want.scale
    said = QuantiserNote(rows=rows, codes=want.codes, scale=scale, want=want, is_wrong=wrong)
    assert "those of" not in said(PLACES[rank == 0])


def test_codes_that_are_no_numbers_are_not_sized():
    want = quantised()
    scale = changed(want.scale, (0, 0), torch.tensor(torch.nan, dtype=torch.float64))
    assert "times their size" not in note(want, scale=scale)
