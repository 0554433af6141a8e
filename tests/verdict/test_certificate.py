"""What is certified, what is refused, and that a backend keeps its word."""

import pytest
import torch
from torch import Tensor

from moe.arithmetic import AccumulatorWidths, ArithmeticModel
from moe.formats import Stage
from moe.random_tensors import seeded
from reports.verdict.exact_check import EXACT
from scenarios.exact_weights import ExactWeights
from tests.verdict.clean_runs import FOUR_RANKS, SETTINGS, run_clean
from tests.verdict.exact_runs import EXACT_RUNS, asked_of, clean_judgement, exact_run

WIDE = AccumulatorWidths(in_block=24, across_blocks=24)


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_made_inputs_are_certified(name):
    facts = clean_judgement(name).certificate
    assert facts.refusal is None
    assert facts.output.certified >= 0.95
    assert facts.output.void < 0.1


@pytest.mark.parametrize("name", SETTINGS)
def test_random_inputs_are_refused_and_the_check_is_not_asked(name):
    run = run_clean(*SETTINGS[name])
    judgement = asked_of(run, widths=WIDE)
    assert judgement.certificate.output.certified < 0.01
    assert "of the output is certified, 90% are needed" in judgement.certificate.refusal
    assert EXACT not in judgement.ledger.asked


def test_a_refusal_names_the_condition_that_fewest_cells_fulfil():
    facts = asked_of(run_clean(*SETTINGS["bf16"]), widths=WIDE).certificate
    assert facts.least in facts.refusal
    assert facts.least_share < 0.1


def test_a_narrow_accumulator_certifies_less():
    """Rows of w13 read an anchor 256 times: 11 bits from the smallest value to it."""
    narrow = ArithmeticModel(scaled_block=128, truncated_bits=4)
    facts = asked_of(exact_run("fp32"), arithmetic=narrow).certificate
    assert facts.refusal is not None
    assert facts.stages[Stage.GEMM1].certified < 0.9


def test_a_tensor_core_of_14_bits_certifies_as_much():
    hopper = ArithmeticModel(scaled_block=128, truncated_bits=14)
    facts = asked_of(exact_run("fp32"), arithmetic=hopper).certificate
    assert torch.equal(facts.output_cells, clean_judgement("fp32").certificate.output_cells)


def test_a_backend_that_is_narrower_than_declared_breaks_its_contract():
    measured = AccumulatorWidths(in_block=14, across_blocks=24)
    ledger = asked_of(exact_run("ue8m0"), widths=measured).ledger
    assert [(one.check, one.stage, one.got, one.want) for one in ledger.deviations] == [
        ("contract", Stage.GEMM1, 14.0, 24.0),
        ("contract", Stage.GEMM2, 14.0, 24.0),
    ]


def test_a_factor_off_the_grid_in_a_ranks_sum_holds_for_its_topology_alone():
    run = run_clean(
        "inputs.modes=[exact]",
        *EXACT_RUNS["partials"],
        "model.overrides.routed_scaling_factor=2.827",
    )
    facts = asked_of(run).certificate
    assert facts.same_topology_only
    assert facts.refusal is None
    assert not clean_judgement("partials").certificate.same_topology_only


def test_sums_have_room_left_and_say_how_much():
    reductions = clean_judgement("ue8m0").certificate.reductions
    named = {one.name: one for one in reductions}
    assert set(named) == {"gemm1 sums", "gemm2 sums", "partial sums"}
    assert named["partial sums"].bits == 8
    assert named["gemm1 sums"].largest / named["gemm1 sums"].quantum <= 2**6


def careless(self: ExactWeights, name: str, width: int, expert: int) -> tuple[Tensor, Tensor]:
    """Small integers over 16, without a thought for how many bits their sums need."""
    drawn = seeded(self.seed, f"careless.{name}", expert)
    w13 = torch.randint(-4, 5, (2 * width, self.hidden_size), generator=drawn)
    w2 = torch.randint(-4, 5, (self.hidden_size, width), generator=drawn)
    return (w13 / 16).to(torch.bfloat16), (w2 / 16).to(torch.bfloat16)


def test_integers_without_a_certificate_differ_between_topologies_and_are_refused(monkeypatch):
    monkeypatch.setattr(ExactWeights, "gated_mlp", careless)
    one_rank = ("parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}", "batch.tokens=[17]")
    on_four, on_one = (
        asked_of(run_clean("inputs.modes=[exact]", "moe.recipe=bf16", *ranks))
        for ranks in (FOUR_RANKS, one_rank)
    )
    assert not torch.equal(on_four.output, on_one.output)
    for judgement in (on_four, on_one):
        assert judgement.certificate.refusal is not None
        assert judgement.certificate.output.certified < 0.1
        assert EXACT not in judgement.ledger.asked
