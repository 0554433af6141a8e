"""What a result says of exact mode: refused rounds, unfit certificates, what was compared."""

from dataclasses import replace

import pytest

from actors.certificates import certificate_of
from actors.driver import run_scenario
from actors.gemm import widths_of
from actors.rank_program import RankProgram
from actors.resolve import resolve
from actors.result_rows import CHECKS, checks_of, visibility_of
from moe.arithmetic import AccumulatorWidths
from moe.formats import ScaleFormat
from moe.grouped_gemm import TorchGemm
from reports.verdict.exact_compared import EXACT
from reports.verdict.exact_refusal import refused

EXACT_MODE = ("inputs.modes=[exact]", "moe.recipe=bf16")


@pytest.fixture(scope="module")
def outcome(load):
    return run_scenario(load(*EXACT_MODE, "run.rounds=2", "moe.dispatcher=standard"), asks=False)


def with_facts(run, **changes):
    facts = replace(run.judgement.certificate, **changes)
    return replace(run, judgement=replace(run.judgement, certificate=facts))


def exact_check(runs):
    return next(check for check in checks_of(runs) if check.name == EXACT)


def test_a_refused_round_beside_one_that_agrees_is_named(outcome):
    first, second = outcome.runs
    runs = [first, with_facts(second, refusal="the condition does not hold")]
    check, certificate = exact_check(runs), certificate_of([run.judgement for run in runs])
    assert check.verdict == "agree"
    assert f"; left out: round 1 ({certificate.refusal})" in check.detail
    assert certificate.round == 1


def test_a_refusal_says_what_to_set():
    refusal = refused(0.5, "partial sums", 0.25)
    assert "the condition that fewest cells fulfil: partial sums" in refusal
    assert "moe.shared_experts" in refusal


def test_a_forward_that_was_not_refused_names_its_round(outcome):
    certificate = certificate_of([outcome.runs[0].judgement])
    assert (certificate.round, certificate.refusal) == (0, None)
    assert exact_check(outcome.runs[:1]).detail == CHECKS[EXACT]


def test_a_certificate_that_is_not_the_goldens_fails_the_check(outcome):
    first = outcome.runs[0]
    check = exact_check([with_facts(first, disagreement="they disagree in stage gemm1")])
    assert (check.verdict, check.detail) == ("failed", "they disagree in stage gemm1")


def test_only_stages_that_are_compared_say_what_exact_mode_would_have_shown(outcome):
    """Sums of a rank alone are in post_permute; combine moves none in this dispatcher."""
    notes = {row.stage: row.note for row in visibility_of(outcome.runs[0])}
    assert "exact" not in notes["combine"]
    assert "; exact: half a bf16 ulp in any of the" in notes["post_permute"]


def test_stages_of_codes_speak_of_codes(load):
    (run,) = run_scenario(load("inputs.modes=[exact]"), asks=False).runs
    notes = {row.stage: row.note for row in visibility_of(run)}
    assert "; exact: another code or scale in any of the" in notes["pre_permute"]
    assert "; exact: half a bf16 ulp, or another code or scale, in any" in notes["activation"]


def test_random_inputs_are_said_to_be_not_made_for_it(load):
    (run,) = run_scenario(load(), asks=False).runs
    check = exact_check([run])
    assert check.verdict == "not_applicable"
    assert check.detail == "inputs of this mode are not made to be exact"


def test_widths_are_measured_once_a_backend(monkeypatch):
    asked = []

    def measure(gemm, scale_format):
        asked.append((type(gemm), scale_format))
        return AccumulatorWidths(in_block=1, across_blocks=1)

    monkeypatch.setattr("actors.gemm.measured_widths", measure)
    widths_of.cache_clear()
    try:
        for _ in range(2):
            widths_of("torch", ScaleFormat.NONE)
        assert asked == [(TorchGemm, ScaleFormat.NONE)]
    finally:
        widths_of.cache_clear()


def test_the_backend_that_is_measured_is_the_one_that_ranks_take(load):
    program = RankProgram(0, resolve(load()).plan)
    assert program._gemm.name == resolve(load()).plan.gemm == "torch"
