"""What the note says of a quantiser that went wrong: how far its values are off."""

import torch

from moe.formats import ScaleFormat
from moe.golden import Quantized, quantize_groups, round_e4m3
from reports.verdict.quantiser_note import QuantiserNote

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
    said = QuantiserNote(codes=codes, scale=scale, want=want, noise=0.0, is_wrong=differs)
    return said(PLACES)


def changed(scale: torch.Tensor, at: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    other = scale.clone()
    other[at] = value
    return other


def test_nothing_is_said_of_what_is_right():
    assert note(quantised()) == ""


def test_a_halved_scale_is_sized():
    want = quantised()
    words = note(want, scale=changed(want.scale, (2, 1), want.scale[2, 1] / 2))
    assert words.startswith("wrong groups: 1, 0.4988 times their size on average")


def test_scales_rounded_up_after_quantising_are_sized():
    want = quantised()
    grouped = want.scaled.view(TOKENS, BLOCKS, 128)
    exact = round_e4m3(grouped * 448.0 / grouped.abs().amax(-1, keepdim=True))
    words = note(want, codes=exact.view(TOKENS, -1))
    true_factor = (448.0 / grouped.abs().amax(-1)).mean()
    assert f"{float(true_factor):.2f}" in words


def test_codes_that_are_no_numbers_are_not_sized():
    want = quantised()
    scale = changed(want.scale, (0, 0), torch.tensor(torch.nan, dtype=torch.float64))
    assert "times their size" not in note(want, scale=scale)
