"""Bands: their literals, and sums in deliberately bad orders that must stay inside or leave."""

import pytest
import torch

from moe.arithmetic import ArithmeticModel, compounded
from moe.formats import ScoringFunc
from moe.golden import GoldenRouting
from reports.verdict.band import (
    fp32_noise,
    gemm_noise,
    reciprocal_noise,
    score_noise,
    stored_bf16,
    stored_fp32,
    weight_noise,
)

U = 2.0**-24
TERMS = 1024
MODEL = ArithmeticModel()


@pytest.mark.parametrize(
    ("model", "terms", "roundings", "unit"),
    [
        (ArithmeticModel(), 1, 0, U),
        (ArithmeticModel(), 2, 1, U),
        (ArithmeticModel(), 4096, 4095, U),
        (ArithmeticModel(summed_block=256), 256, 255, U),
        (ArithmeticModel(summed_block=256), 7168, 255 + 27, U),
        (ArithmeticModel(accumulator_bits=14), 128, 127, 2.0**-14),
        (ArithmeticModel(scaled_block=128), 4096, 127 + 2 + 32, U),
        (ArithmeticModel(scaled_block=128), 129, 127 + 2 + 2, U),
        (ArithmeticModel(scaled_block=128), 64, 63 + 2 + 1, U),
    ],
    ids=[
        "1",
        "2",
        "4096",
        "one block",
        "28 blocks",
        "14 bits",
        "32 blocks",
        "2 blocks",
        "half a block",
    ],
)
def test_sum_error_counts_the_roundings(model, terms, roundings, unit):
    assert model.sum_error(terms) == roundings * unit / (1 - roundings * unit)


@pytest.mark.parametrize("roundings", [1, 7, 1000])
def test_compounded_is_no_less_than_the_product_of_the_factors(roundings):
    assert compounded(roundings, U) >= (1 + U) ** roundings - 1


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (reciprocal_noise(ArithmeticModel()), 3 * U),
        (float(fp32_noise(torch.tensor(8.0), 2)), 8 * 2 * U / (1 - 2 * U)),
        (float(fp32_noise(torch.tensor(8.0), -1)), 0.0),
        (float(gemm_noise(torch.tensor(4.0), 3, ArithmeticModel())), 4 * 2 * U / (1 - 2 * U)),
    ],
    ids=[
        "reciprocal",
        "two roundings",
        "no rounding",
        "gemm",
    ],
)
def test_noise_literals(got, want):
    assert got == pytest.approx(want, rel=1e-6)


def routing(scoring_func=ScoringFunc.SQRTSOFTPLUS, top_k=6, **rule):
    return GoldenRouting(scoring_func=scoring_func, top_k=top_k, **{"renormalize": True} | rule)


LOGITS = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("scoring_func", "ulp", "roundings"),
    [
        (ScoringFunc.SQRTSOFTPLUS, 2.0, [11.5, 11.5, 11.5]),
        (ScoringFunc.SQRTSOFTPLUS, 1.0, [6.5, 6.5, 6.5]),
        (ScoringFunc.SIGMOID, 2.0, [9.0, 9.0, 9.0]),
        (ScoringFunc.SOFTMAX, 2.0, [0 + 5 + 15.0, 2 + 5 + 15.0, 5 + 5 + 15.0]),
    ],
    ids=["sqrtsoftplus", "sqrtsoftplus, 1 ulp", "sigmoid", "softmax"],
)
def test_a_scores_noise_counts_its_own_roundings(scoring_func, ulp, roundings):
    noise = score_noise(routing(scoring_func), LOGITS, ArithmeticModel(transcendental_ulp=ulp))
    assert noise.tolist() == [[count * U for count in roundings]]


@pytest.mark.parametrize(
    ("rule", "roundings"),
    [
        ({"renormalize": True}, [3 + 7 + 10, 7 + 7 + 10]),
        ({"renormalize": False}, [3, 7]),
        ({"renormalize": False, "hashed": True}, [3 + 7 + 10, 7 + 7 + 10]),
    ],
    ids=["share", "bare", "hashed"],
)
def test_a_weights_noise_is_its_scores_or_that_of_a_share(rule, roundings):
    noise = torch.tensor([[3.0, 5.0, 7.0]], dtype=torch.float64) * U
    found = weight_noise(routing(**rule), noise, torch.tensor([[0, 2]]), MODEL)
    assert found.tolist() == [[count * U for count in roundings]]


def scores_in_fp32(scoring_func, logits):
    match scoring_func:
        case ScoringFunc.SQRTSOFTPLUS:
            return (logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()
        case ScoringFunc.SIGMOID:
            return 1 / (1 + torch.exp(-logits))
        case ScoringFunc.SOFTMAX:
            terms = torch.exp(logits - logits.amax(dim=1, keepdim=True))
            return terms / terms.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("scoring_func", ScoringFunc)
def test_scores_in_fp32_stay_within_their_noise(scoring_func):
    logits = torch.randn(500, 64, generator=torch.Generator().manual_seed(4)) * 6
    want = scores_in_fp32(scoring_func, logits.double())
    got = scores_in_fp32(scoring_func, logits).double()
    noise = score_noise(routing(scoring_func), logits.double(), MODEL)
    assert ((got - want).abs() / want <= noise).all()


def test_stored_bf16_covers_round_to_nearest_of_every_finite_value():
    """The neighbourhood of every bf16 value and midpoint, down to the smallest subnormal."""
    codes = torch.arange(0x7F7F, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40)])
    stored = values.to(torch.bfloat16).double()
    assert ((stored - values).abs() <= stored_bf16(values, torch.zeros(()))).all()


def test_stored_bf16_does_not_cover_a_second_last_place():
    codes = torch.arange(0x0080, 0x7F7E, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    two_off = (codes.view(torch.int16) + 2).view(torch.bfloat16).double()
    values = codes.double()
    assert ((two_off - values).abs() > stored_bf16(values, torch.zeros(()))).all()


def test_stored_bf16_covers_noise_in_front_of_the_store():
    want = torch.linspace(-3, 3, 997, dtype=torch.float64)
    noise = torch.full_like(want, 0.01)
    for sign in (-1, 1):
        stored = (want + sign * noise).to(torch.bfloat16).double()
        assert ((stored - want).abs() <= stored_bf16(want, noise)).all()


def products():
    """[64, TERMS] fp32 products of bf16 factors, each row with heavy cancellation."""
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(2, 64, TERMS, generator=generator).to(torch.bfloat16).to(torch.float32)
    return factors[0] * factors[1]


def sequential(terms, dtype=torch.float32):
    total = torch.zeros(terms.shape[0], dtype=dtype)
    for column in terms.unbind(1):
        total = (total + column).to(dtype)
    return total


def pairwise(terms):
    while terms.shape[1] > 1:
        terms = terms[:, ::2] + terms[:, 1::2]
    return terms[:, 0]


def largest_first(terms):
    return sequential(terms.gather(1, terms.abs().argsort(dim=1, descending=True)))


def error_in_bands(total, terms):
    want = terms.double().sum(1)
    band = gemm_noise(terms.double().abs().sum(1), TERMS, ArithmeticModel())
    return (total.double() - want).abs() / band


@pytest.mark.parametrize(
    "summed",
    [sequential, lambda terms: sequential(terms.flip(1)), pairwise, largest_first],
    ids=["sequential", "reversed", "pairwise", "largest first"],
)
def test_any_order_of_fp32_sums_stays_in_the_band(summed):
    terms = products()
    assert error_in_bands(summed(terms), terms).max() <= 1


def test_a_bf16_accumulator_leaves_the_band():
    terms = products()
    assert error_in_bands(sequential(terms, torch.bfloat16), terms).max() > 1


def test_a_sum_whose_every_rounding_errs_the_same_way_stays_in_the_band():
    """One and then terms of half a last place and a bit: each addition rounds up."""
    terms = torch.full((1, TERMS), 2.0**-24 * 1.01)
    terms[0, 0] = 1.0
    total = sequential(terms)
    assert total.item() > 1 + TERMS * 2.0**-23 * 0.99
    assert 0.9 < error_in_bands(total, terms).item() <= 1


def test_scaled_blocks_stay_in_their_band_and_a_bf16_partial_leaves_it():
    terms, scale = products().view(64, 8, 128), torch.tensor(0.7)
    partials = [sequential(block) * scale for block in terms.unbind(1)]
    model = ArithmeticModel(scaled_block=128)
    want = terms.double().sum((1, 2)) * scale.double()
    band = gemm_noise(terms.double().abs().sum((1, 2)) * scale.double(), TERMS, model)
    total = sequential(torch.stack(partials, dim=1))
    rounded = sequential(torch.stack([p.bfloat16().float() for p in partials], dim=1))
    assert ((total.double() - want).abs() / band).max() <= 1
    assert ((rounded.double() - want).abs() / band).max() > 1


def test_a_sum_whose_terms_may_overflow_fp32_has_no_band():
    magnitude = torch.tensor([1e38, 3.5e38], dtype=torch.float64)
    assert gemm_noise(magnitude, 2, MODEL).isinf().tolist() == [False, True]


def test_scales_that_multiply_to_a_subnormal_cost_a_multiple_of_the_smallest_number():
    scaled = ArithmeticModel(scaled_block=128)
    nothing = torch.zeros(1, dtype=torch.float64)
    assert gemm_noise(nothing, 128, scaled).item() == 128 * 448**2 * 2.0**-149
    assert gemm_noise(nothing, 128, MODEL).item() == 0


def test_what_fp32_cannot_hold_has_no_band():
    want, noise = torch.tensor([1.0, 3.5e38], dtype=torch.float64), torch.zeros(2).double()
    assert stored_fp32(want, noise).tolist() == [2.0**-149, float("inf")]
