"""Traces on disk to a result, whoever wrote them."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.driver import run_scenario
from actors.judge_trace import TraceError, _resolved, judge_trace
from actors.output import write_outcome
from moe.arithmetic import DEEP_GEMM_SM90
from moe.faults import FAULTS
from moe.formats import Stage
from moe.trace import load_traces, save_traces
from reports.result import CheckVerdict
from scenarios.errors import UserError
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"


def load(*settings, inject=()):
    return load_scenario(
        SMOKE,
        overrides=("run.runtime=loopback", *settings),
        injects=inject,
        known_faults=FAULTS,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The traces of a clean run and of one with a fault, each in a folder."""
    folders = {}
    for name, inject in (("clean", ()), ("faulty", ("partial_dropped",))):
        folders[name] = tmp_path_factory.mktemp(name)
        outcome = run_scenario(load(inject=inject))
        write_outcome(outcome, folders[name], with_tensors=False, with_traces=True)
    return {name: folder / "traces" / "random" for name, folder in folders.items()}


@pytest.fixture(scope="module")
def clean_result(saved):
    return judge_trace(load(), saved["clean"], "python run.py judge").result


@pytest.fixture
def changed(saved, tmp_path):
    """Write the clean traces with each file's tensors changed, as another engine would."""

    def change(edit):
        for file in sorted(saved["clean"].iterdir()):
            tensors = load_file(file)
            edit(tensors)
            save_file(tensors, tmp_path / file.name)
        return tmp_path

    return change


def test_a_judged_trace_has_the_verdict_of_its_run(saved):
    result = judge_trace(load(), saved["faulty"]).result
    ran = run_scenario(load(inject=("partial_dropped",))).result
    assert result.first_divergence == ran.first_divergence
    assert (result.verdict, result.as_expected) == ("discrepancy", False)


def test_a_clean_trace_agrees(clean_result):
    assert clean_result.verdict == "agree"
    assert "every stage within its band" in clean_result.summary


def test_the_result_says_that_no_rank_ran(clean_result):
    assert clean_result.backends["runtime"].name == "judged trace"
    assert {info.node for info in clean_result.ranks} == {"elsewhere"}
    assert (clean_result.traffic, clean_result.reproduce) == ((), "python run.py judge")


def test_calls_and_bytes_are_said_to_be_left_out(clean_result):
    (accounts,) = (check for check in clean_result.checks if check.name == "accounts")
    assert accounts.verdict == CheckVerdict.AGREE
    assert accounts.detail.endswith("left out: calls and bytes (a trace holds no collectives)")


def test_a_fault_of_the_scenario_is_said_not_to_act(saved):
    result = judge_trace(load(inject=("partial_dropped",)), saved["clean"]).result
    assert result.verdict == "agree"
    assert "inject ['partial_dropped'] was not applied: no forward ran" in result.notes


def test_a_stage_that_was_not_captured_is_said_not_to_be_judged(changed):
    folder = changed(lambda tensors: [tensors.pop(k) for k in list(tensors) if "gemm1/" in k])
    result = judge_trace(load(), folder).result
    assert result.verdict == "agree"
    assert result.summary.endswith("; not judged: gemm1, activation in part")
    assert "not judged: gemm1: gemm1/gate_up was not captured" in result.notes


def test_a_check_without_anything_to_look_at_is_not_applicable(changed):
    folder = changed(
        lambda tensors: [tensors.pop(k) for k in list(tensors) if not k.startswith("route/")]
    )
    verdicts = {check.name: check for check in judge_trace(load(), folder).result.checks}
    accounts = verdicts["accounts"]
    assert accounts.verdict == CheckVerdict.NOT_APPLICABLE
    assert "arrivals (dispatch/handle.source_rank was not captured)" in accounts.detail
    assert verdicts["router rule"].verdict == CheckVerdict.AGREE


def test_strides_of_another_engine_are_nobodys_business(changed):
    result = judge_trace(load(), changed(lambda tensors: None)).result
    assert result.verdict == "agree"
    assert (
        "the files say nothing of strides: scales were read as if laid out as due" in result.notes
    )


def test_strides_that_were_saved_are_judged(saved, tmp_path):
    first, *others = load_traces(saved["clean"])
    named = dict(first[Stage.ACTIVATION])
    scale = named["hidden_states_scale"]
    named["hidden_states_scale"] = scale.clone(memory_format=torch.contiguous_format)
    save_traces([replace(first, stages={**first.stages, Stage.ACTIVATION: named})], tmp_path)
    save_traces(others, tmp_path)
    divergence = judge_trace(load(), tmp_path).result.first_divergence
    assert (divergence.stage, divergence.rank) == ("activation", 0)
    assert "MN-major" in divergence.detail


def test_tokens_of_a_file_are_held_against_those_of_the_trace(saved, tmp_path):
    tokens = torch.ones(8, 256, dtype=torch.bfloat16)
    save_file({"hidden_states": tokens}, tmp_path / "tokens.safetensors")
    path = f"inputs.path={tmp_path / 'tokens.safetensors'}"
    result = judge_trace(load("inputs.modes=[file]", path), saved["clean"]).result
    assert (result.first_divergence.stage, result.first_divergence.tensor) == ("glue_in", "own")


def test_several_modes_are_refused(saved, tmp_path):
    tokens = torch.ones(8, 256, dtype=torch.bfloat16)
    save_file({"hidden_states": tokens}, tmp_path / "tokens.safetensors")
    path = f"inputs.path={tmp_path / 'tokens.safetensors'}"
    with pytest.raises(TraceError, match=r"inputs.modes is \[random, file\]: name one"):
        judge_trace(load("inputs.modes=[random, file]", path), saved["clean"])


def test_a_trace_of_another_layer_is_refused_with_every_problem(saved):
    with pytest.raises(TraceError) as caught:
        judge_trace(load("model.overrides.n_routed_experts=16"), saved["clean"])
    assert str(caught.value).startswith(
        f"{saved['clean']}: {len(caught.value.problems)} problem(s)"
    )
    assert {"route/0/logits", "route/1/logits"} <= {
        problem.partition(":")[0] for problem in caught.value.problems
    }


def test_a_trace_of_which_nothing_can_be_judged_is_refused_with_what_is_missing(changed):
    folder = changed(
        lambda tensors: [tensors.pop(k) for k in list(tensors) if not k.startswith("gemm1/")]
    )
    with pytest.raises(TraceError) as caught:
        judge_trace(load(), folder)
    assert caught.value.problems[0] == "no stage can be judged"
    assert "gemm1: pre_permute/rows.m_indices was not captured" in caught.value.problems


def test_a_folder_without_traces_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        judge_trace(load(), tmp_path)


def test_deep_gemms_narrow_accumulator_widens_the_band(saved, tmp_path):
    settings = ("platform=sm90",)
    outcome = run_scenario(load(*settings))
    save_traces([report.trace for report in outcome.runs[0].reports], tmp_path)
    worst = []
    for gemm in ("auto", "deep_gemm"):
        result = judge_trace(load(*settings, f"run.backends.gemm={gemm}"), tmp_path).result
        worst.append(max(row.own_worst for row in result.stages if row.stage == "gemm1"))
    assert worst[1] < worst[0] <= 1


@pytest.mark.parametrize(
    ("platform", "error"),
    [
        ("sm100", 256 * 2**-23 / (1 - 256 * 2**-23)),  # any order of all 256 columns
        ("sm90", 128 * 2**-23 / (1 - 128 * 2**-23)),  # of 128, before a scale
    ],
)
def test_another_engine_is_taken_to_cut_off_what_24_bits_do_not_hold(saved, platform, error):
    resolved = _resolved(load(f"platform={platform}"), saved["clean"], "random")
    arithmetic = resolved.judged.arithmetic
    assert arithmetic.truncates
    assert error <= arithmetic.sum_error(256) <= error * 1.02
    assert "cut off the rest" in resolved.backends["gemm"].reason


def test_the_declared_error_of_a_narrow_accumulator():
    inside = 128 * 2**-13 / (1 - 128 * 2**-13)
    across = 3 * 2**-24 / (1 - 3 * 2**-24)
    assert DEEP_GEMM_SM90.sum_error(128) == pytest.approx(inside + (1 + inside) * across, rel=1e-12)


def test_tensors_that_no_check_reads_are_named(clean_result):
    unread = [note for note in clean_result.notes if note.endswith("no check reads it")]
    assert unread == [
        f"not judged: dispatch/handle.{name}: no check reads it"
        for name in ("recv_counts", "send_counts", "sent_row")
    ]


def test_a_gemm_that_cannot_be_imported_is_bad_input(saved):
    with pytest.raises(UserError, match=r"a\.b:C: No module named 'a'"):
        judge_trace(load("run.backends.gemm=a.b:C"), saved["clean"])


def test_bands_are_those_that_a_gemm_of_ones_own_declares(saved):
    loaded = load("run.backends.gemm=tests.mutation.own_gemms:Right")
    result = judge_trace(loaded, saved["clean"]).result
    assert result.verdict == "agree"
    assert result.backends["gemm"].reason.endswith("tests.mutation.own_gemms:Right declares")


@pytest.mark.parametrize("kind", ["dropped", "balanced", "hot_expert"])
def test_routes_of_the_router_where_others_are_pinned_are_a_guess(saved, kind):
    first = judge_trace(load(f"batch.routing.kind={kind}"), saved["clean"]).result.findings[0]
    assert (first.stage, first.tensor, first.confidence) == ("route", "topk_ids", "low")
    assert first.diagnosis.startswith("experts of the router's own choice")


def test_an_id_that_is_no_slot_is_told_by_its_value(changed):
    def out_of_range(tensors):
        if "dispatch/1/physical_ids" in tensors:
            tensors["dispatch/1/physical_ids"][0, 0] = 2**30

    findings = judge_trace(load(), changed(out_of_range)).result.findings
    told = [one for one in findings if one.tensor == "physical_ids"]
    assert {one.got for one in told} == {None, 2.0**30}
    assert not any("are -1" in one.diagnosis for one in told)
