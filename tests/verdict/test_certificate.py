"""What is certified, what is refused, and that a backend keeps its word."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.arithmetic import AccumulatorWidths, ArithmeticModel
from moe.formats import Stage
from moe.random_tensors import seeded
from reports.verdict import certified_layer, certified_sums
from reports.verdict.exact_compared import EXACT
from reports.verdict.exact_refusal import REMEDIES
from reports.verdict.exact_rows import activated
from scenarios.exact_weights import ExactWeights
from tests.verdict.clean_runs import FOUR_RANKS, SETTINGS, run_clean
from tests.verdict.exact_runs import EXACT_RUNS, asked_of, certified, clean_judgement, exact_run

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
    found = {(one.check, one.stage, one.rank, one.got, one.want) for one in ledger.deviations}
    assert found == {
        ("contract", stage, rank, 14.0, 24.0)
        for stage in (Stage.GEMM1, Stage.GEMM2)
        for rank in range(4)
    }


def test_no_more_bits_are_certified_than_were_measured():
    measured = AccumulatorWidths(in_block=4, across_blocks=24)
    facts = asked_of(exact_run("fp32"), widths=measured).certificate
    assert facts.refusal is not None
    assert facts.stages[Stage.GEMM1].certified < 0.9


def test_a_forward_whose_cells_fulfil_every_condition_names_none():
    facts = clean_judgement("bf16").certificate
    assert (facts.least, facts.least_share) == (None, 1.0)


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_every_condition_has_a_remedy(name):
    stages, _ = certified(name)
    assert stages.conditions.counts.keys() <= REMEDIES.keys()


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_shares_are_of_what_is_compared_and_of_nothing_else(name):
    stages = clean_judgement(name).certificate.stages
    everywhere = set(Stage) - {Stage.WEIGHTS}
    assert set(stages) == everywhere - ({Stage.COMBINE} if name == "partials" else set())


def test_stages_of_codes_are_told_from_stages_of_values():
    stages = clean_judgement("ue8m0").certificate.stages
    assert (stages[Stage.PRE_PERMUTE].coded, stages[Stage.GEMM1].coded) == (1.0, 0.0)


def test_a_certificate_that_is_not_the_goldens_judges_nothing(monkeypatch):
    def doubled(*given):
        source = activated(*given)
        return replace(source, value=2 * source.value)

    monkeypatch.setattr(certified_layer, "activated", doubled)
    judgement = asked_of(exact_run("bf16"))
    assert "disagree in stage activation" in judgement.certificate.disagreement
    assert EXACT not in judgement.ledger.asked


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


@pytest.mark.parametrize("factor", [1.5, 2.827], ids=["at once", "by rank"])
def test_sums_token_by_token_are_those_of_all_tokens(factor, monkeypatch):
    override = f"model.overrides.routed_scaling_factor={factor}"
    run = run_clean("inputs.modes=[exact]", *EXACT_RUNS["partials"], override)
    whole = asked_of(run).certificate
    monkeypatch.setattr(certified_sums, "BLOCK_BYTES", 1)
    singly = asked_of(run).certificate
    assert torch.equal(singly.output_cells, whole.output_cells)
    assert singly.reductions == whole.reductions


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
