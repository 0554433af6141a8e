"""The noise floor: what twins of the golden differ by, held against the bands themselves."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict import twins
from reports.verdict.judge import Judge


@pytest.fixture(scope="module", name="judgement")
def _judgement(clean):
    return Judge(clean.resolved.judged).judge(clean.batch, clean.traces, clean.calls, 3)


def test_every_stage_that_the_golden_keeps_has_a_row(judgement):
    assert [row.stage for row in judgement.noise] == [
        Stage.GEMM1,
        Stage.ACTIVATION,
        Stage.GEMM2,
        Stage.COMBINE,
        Stage.GLUE_OUT,
    ]


def test_no_twin_leaves_its_band(judgement):
    own = [row.own_worst for row in judgement.noise if row.own_worst is not None]
    assert own
    assert max(own) <= 1


def test_twins_differ_in_the_end_by_less_than_a_bf16_place(judgement):
    assert all(0 <= row.spread < 2.0**-5 for row in judgement.noise)


def test_the_tokens_of_all_twins_are_counted(clean, judgement):
    assert {row.tokens for row in judgement.noise} == {len(clean.batch.hidden_states)}


def test_no_twins_are_made_unless_asked_for(clean):
    assert Judge(clean.resolved.judged).judge(clean.batch, clean.traces, clean.calls).noise == ()


@pytest.mark.parametrize("tokens", [1, 31, 32, 63, 64, 65, 1000])
def test_twins_spread_over_all_tokens(tokens):
    for shift in range(3):
        places = twins.spread(32, tokens, shift).sort().values
        assert len(torch.unique(places)) == min(32, tokens)
        around = places.diff(append=places[:1] + tokens)
        assert int(around.max() - around.min()) <= 1


def test_no_place_among_none():
    assert twins.spread(4, 0, 1).tolist() == []


def test_every_seed_has_twins_of_its_own(clean_ue8m0, monkeypatch):
    run, forward, drawn = clean_ue8m0, twins.golden_forward, []

    def noted(model, *args, **kwargs):
        drawn.append(model.twin)
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(twins, "golden_forward", noted)
    for seed in (7, 8):
        Judge(replace(run.resolved.judged, seed=seed)).judge(run.batch, run.traces, run.calls, 2)
    assert len(set(drawn)) == 4


def test_large_experts_leave_the_first_token_alone(clean, monkeypatch):
    monkeypatch.setattr(twins, "SAMPLED_WEIGHTS", 1)
    judged = Judge(clean.resolved.judged).judge(clean.batch, clean.traces, clean.calls, 1)
    assert {row.tokens for row in judged.noise} == {1}


def test_a_twin_with_a_mistake_leaves_its_band(clean, monkeypatch):
    forward = twins.golden_forward

    def mistaken(*args, **kwargs):
        twin = forward(*args, **kwargs)
        return replace(twin, gate_up=(twin.gate_up * 1.02).to(torch.bfloat16).to(torch.float32))

    monkeypatch.setattr(twins, "golden_forward", mistaken)
    judged = Judge(clean.resolved.judged).judge(clean.batch, clean.traces, clean.calls, 1)
    own = {row.stage: row.own_worst for row in judged.noise}
    assert own[Stage.GEMM1] > 1
