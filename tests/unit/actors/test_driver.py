"""One scenario end to end on loopback: every verdict, every mode, idle ranks."""

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

from actors import world
from actors.driver import run_scenario
from actors.rank_program import RankProgram
from actors.resolve import resolve
from moe.formats import Stage
from reports.verdict.ledger import bitwise_equal
from scenarios.errors import InputError

SCHEMA = json.loads(Path("reports/result.schema.json").read_text())
EXPECTED = "expect={verdict: discrepancy, stage: %s}"


@pytest.fixture(scope="session")
def outcome(load):
    """``outcome("key=value", ..., inject=(...))``; equal calls share one run."""
    return cache(lambda *settings, inject=(): run_scenario(load(*settings, inject=inject)))


def test_a_clean_run_agrees(outcome):
    result = outcome().result
    assert (result.verdict, result.as_expected) == ("agree", True)
    assert (result.first_divergence, result.findings) == (None, ())
    assert result.summary.startswith("agree: 2 ranks, 8 tokens; every stage within its band")


CASES = {
    "agree": ((), ()),
    "discrepancy": ((), ("tokens_swapped",)),
    "failed": ((), ("rank_raises",)),
    "unsupported": (("run.device=cuda",), ()),
    "exact": (("inputs.modes=[exact, random]",), ()),
    "idle": (("batch.tokens=[0, 0]",), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_result_fits_the_published_schema(outcome, case):
    settings, inject = CASES[case]
    result = outcome(*settings, inject=inject).result
    jsonschema.validate(result.model_dump(mode="json"), SCHEMA)


def test_a_discrepancy_nobody_expected_is_not_as_expected(outcome):
    result = outcome(inject=("tokens_swapped",)).result
    assert (result.verdict, result.as_expected) == ("discrepancy", False)
    assert result.summary.startswith("discrepancy: stage dispatch, rank 1, token ")


@pytest.mark.parametrize(
    ("stage", "as_expected"), [("dispatch", True), ("gemm1", False)], ids=["right", "wrong stage"]
)
def test_an_expected_discrepancy_has_to_be_at_its_stage(outcome, stage, as_expected):
    result = outcome(EXPECTED % stage, inject=("tokens_swapped",)).result
    assert (result.verdict, result.as_expected) == ("discrepancy", as_expected)


def test_an_expected_discrepancy_that_does_not_come_is_not_as_expected(outcome):
    result = outcome(EXPECTED % "dispatch").result
    assert (result.verdict, result.as_expected) == ("agree", False)


def test_the_first_divergence_is_the_first_finding(outcome):
    result = outcome(inject=("tokens_swapped", "topk_weights_twice")).result
    first = result.first_divergence.model_dump()
    finding = result.findings[0].model_dump()
    assert first == {key: finding[key] for key in first}
    assert len(result.findings) > 1


def test_findings_stand_in_the_order_of_stages(outcome):
    result = outcome(
        inject=("tokens_swapped:rank=0", "gate_up_swapped", "topk_weights_twice")
    ).result
    positions = [finding.stage.position for finding in result.findings]
    assert positions == sorted(positions)
    assert result.findings[0].stage is Stage.WEIGHTS


def test_a_check_that_found_something_says_where(outcome):
    checks = {check.name: check for check in outcome(inject=("tokens_swapped",)).result.checks}
    moves = checks["contract: moves"]
    assert moves.verdict == "discrepancy"
    assert moves.detail.startswith("dispatch on rank 1: 2 of ")
    assert checks["band"].verdict == "agree"


@pytest.mark.parametrize("fault", ["rank_raises", "combine_skipped"])
def test_a_failed_run_judges_nothing(outcome, fault):
    one = outcome(inject=(fault,))
    assert (one.result.verdict, one.runs) == ("failed", ())
    assert {check.verdict for check in one.result.checks} == {"failed"}


def test_an_expected_failure_is_as_expected(outcome):
    assert outcome("expect=failed", inject=("rank_raises",)).result.as_expected


def test_every_rank_owes_a_state(outcome):
    result = outcome(inject=("rank_raises:rank=0",)).result
    assert [(info.rank, info.verdict) for info in result.ranks] == [(0, "raised"), (1, "released")]
    assert "InjectedError" in result.ranks[0].cause


def test_an_unsupported_scenario_starts_no_rank(load, monkeypatch):
    monkeypatch.setattr(world, "RankProgram", None)
    one = run_scenario(load("run.device=cuda"))
    assert (one.result.verdict, one.runs) == ("unsupported", ())
    assert not one.result.as_expected
    assert one.result.ranks == ()


def test_a_process_fault_on_loopback_is_unsupported(outcome):
    result = outcome(inject=("rank_dies",)).result
    assert result.verdict == "unsupported"
    assert "use ray" in result.summary


def test_with_no_token_values_do_not_apply_and_accounts_decide(outcome):
    result = outcome("batch.tokens=[0, 0]").result
    verdicts = {check.name: check.verdict for check in result.checks}
    assert result.verdict == "agree"
    assert "no token" in result.summary
    assert {verdicts[name] for name in ("accounts", "contract")} == {"agree"}
    assert {verdicts[name] for name in ("band", "quantiser rule", "router rule")} == {
        "not_applicable"
    }


def test_every_stage_of_every_rank_has_a_row(outcome):
    rows = [(row.stage, row.rank) for row in outcome().result.stages]
    assert rows == [(stage, rank) for stage in Stage for rank in range(2)]


def test_traffic_lists_every_collective_with_each_ranks_bytes(outcome):
    traffic = outcome().result.traffic
    assert [(row.stage, row.op) for row in traffic] == [
        ("weights", "all_gather_v"),
        ("dispatch", "all_to_all_v"),
        ("dispatch", "all_to_all_v"),
        ("combine", "all_to_all_v"),
    ]
    assert traffic[1].payload_bytes == (2 * (1 + 4) * 8, 2 * (1 + 4) * 8)


GATHERED = (
    "moe.dispatcher=standard",
    "moe.recipe=bf16",
    "parallel={world_size: 4, attention: {dp: 2, tp: 2}, moe: {ep: 4}}",
    "batch.tokens=[4, 3]",
    "batch.phase=decode",
)


def test_traffic_is_what_topology_and_routes_predict(outcome):
    for settings in ((), GATHERED):
        first, *traffic = outcome(*settings).result.traffic
        assert (first.stage, first.predicted_bytes) == ("weights", ())  # plans are compared
        assert traffic
        assert all(row.payload_bytes == row.predicted_bytes for row in traffic)


def test_traffic_lists_each_group_of_the_glue_with_its_ranks_bytes(outcome):
    """Slots of 4 rows of 256 bf16: in pairs, then their halves over the world, then the sum."""
    row = 256 * 2
    traffic = outcome(*GATHERED).result.traffic[1:]  # behind the comparison of plans
    assert [(one.stage, one.op, one.group, one.payload_bytes) for one in traffic] == [
        ("glue_in", "reduce_scatter_v", (0, 1), (4 * row, 4 * row)),
        ("glue_in", "reduce_scatter_v", (2, 3), (4 * row, 4 * row)),
        ("glue_in", "all_gather_v", (0, 1, 2, 3), (2 * row,) * 4),
        ("tail", "all_reduce", (0, 1, 2, 3), (8 * row,) * 4),
    ]


def test_tokens_are_counted_once_however_many_ranks_hold_them(outcome):
    result = outcome(*GATHERED).result
    assert result.summary.startswith("agree: 4 ranks, 7 tokens;")


def captured(tmp_path, hidden_states):
    path = tmp_path / "captured.safetensors"
    save_file({"hidden_states": hidden_states}, path)
    return path


def test_a_captured_input_gives_the_bits_of_the_run_it_came_from(load, outcome, tmp_path):
    (first,) = outcome().runs
    path = captured(tmp_path, first.batch.hidden_states)
    replay = run_scenario(load("inputs.modes=[file]", f"inputs.path={path}"))
    (again,) = replay.runs
    assert replay.result.verdict == "agree"
    assert {row.mode for row in replay.result.stages} == {"file"}
    for one, other in zip(first.reports, again.reports, strict=True):
        bits = [r.trace[Stage.GLUE_OUT]["hidden_states"].view(torch.int16) for r in (one, other)]
        assert torch.equal(*bits)


def test_two_modes_are_both_judged_on_the_same_ranks(load, tmp_path):
    path = captured(tmp_path, torch.full((8, 256), 0.5, dtype=torch.bfloat16))
    one = run_scenario(load("inputs.modes=[random, file]", f"inputs.path={path}"))
    assert one.result.verdict == "agree"
    assert [run.mode for run in one.runs] == ["random", "file"]
    assert {check.mode for check in one.result.checks} == {"random", "file"}
    assert {row.mode for row in one.result.stages} == {"random", "file"}


def test_a_fault_is_found_in_both_modes(load, tmp_path):
    path = captured(tmp_path, torch.randn(8, 256).to(torch.bfloat16))
    settings = ("inputs.modes=[random, file]", f"inputs.path={path}")
    result = run_scenario(load(*settings, inject=("gate_up_swapped", "partial_dropped"))).result
    found = {(finding.mode, finding.stage) for finding in result.findings}
    assert found == {
        (mode, stage) for mode in ("random", "file") for stage in (Stage.WEIGHTS, Stage.COMBINE)
    }


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden_states": torch.zeros(8, 128, dtype=torch.bfloat16)}, "[8, 128]"),
        ({"hidden_states": torch.zeros(7, 256, dtype=torch.bfloat16)}, "[7, 256]"),
        ({"hidden_states": torch.zeros(8, 256)}, "float32"),
        ({"x": torch.zeros(1)}, "no tensor hidden_states; it holds x"),
    ],
    ids=["width", "tokens", "dtype", "name"],
)
def test_a_captured_input_that_does_not_fit_is_refused(load, tmp_path, tensors, message):
    path = tmp_path / "captured.safetensors"
    save_file(tensors, path)
    with pytest.raises(InputError) as caught:
        run_scenario(load("inputs.modes=[file]", f"inputs.path={path}"))
    assert message in str(caught.value)


def test_ranks_with_different_plans_fail_before_anything_is_exchanged(load, monkeypatch):
    other = load("inputs.seed=8")

    def program(rank, plan, faults, **how):
        return RankProgram(rank, resolve(other).plan if rank == 1 else plan, faults, **how)

    monkeypatch.setattr(world, "RankProgram", program)
    result = run_scenario(load()).result
    assert result.verdict == "failed"
    assert "PlanMismatchError: ranks [1] were given another plan than rank 0" in result.summary
    assert "in stage weights" in result.summary


def test_the_same_scenario_gives_the_same_bits_twice(load, outcome):
    (first,), (again,) = outcome().runs, run_scenario(load()).runs
    for one, other in zip(first.reports, again.reports, strict=True):
        for stage, tensors in one.trace.stages.items():
            for name, tensor in tensors.items():
                theirs = other.trace[stage][name]
                assert bitwise_equal(tensor, theirs).all(), f"{stage}/{name}"


def per_tensor_checkpoint(path, scale):
    """Two experts of 128 x 128 in fp8, every matrix of the first with this scale."""
    tensors = {"model.layers.0.mlp.gate.weight": torch.randn(2, 128).bfloat16()}
    for expert in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.0.mlp.experts.{expert}.{name}"
            tensors[f"{prefix}.weight"] = torch.randn(128, 128).to(torch.float8_e4m3fn)
            tensors[f"{prefix}.weight_scale"] = torch.tensor(0.25 if expert else scale)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("scale", "platform", "verdict"),
    [(0.3, "sm100", "failed"), (0.25, "sm100", "agree"), (0.3, "sm90", "agree")],
)
def test_a_scale_of_a_tensor_must_be_a_power_of_two_where_scales_are_packed(
    load, tmp_path, scale, platform, verdict
):
    path = tmp_path / "model.safetensors"
    per_tensor_checkpoint(path, scale)
    result = run_scenario(
        load(
            "model.preset=mixtral",
            "model.overrides={hidden_size: 128, intermediate_size: 128, num_local_experts: 2}",
            f"model.weights={{kind: safetensors, path: {path}, layer: 0}}",
            "moe.recipe=fp8_per_tensor",
            f"platform={platform}",
        )
    ).result
    assert result.verdict == verdict
    if verdict == "failed":
        assert "in stage weights" in result.summary
        assert "0.300000012 of w13 of expert 0 is no power of two" in result.summary


NO_TOKEN = {"scaling_factor_twice": False, "scaling_factor_missing": False, "experts_strided": True}


@pytest.mark.parametrize(("fault", "acts"), NO_TOKEN.items())
def test_another_plan_acts_on_weights_and_where_there_are_rows(outcome, fault, acts):
    summary = outcome("batch.tokens=[0, 0]", inject=(fault,)).result.summary
    assert (f"fault {fault} found nothing to act on" in summary) is not acts


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_of_another_form_on_one_rank_are_a_discrepancy_of_that_stage(outcome, rank):
    fault = f"dispatch_scale_flag_disagrees:rank={rank}"
    result = outcome("platform=sm90", inject=(fault,)).result
    first = result.first_divergence
    assert (result.verdict, first.stage, first.check) == ("discrepancy", "dispatch", "contract")
    assert first.tensor == "hidden_states_scale"
    assert "torch.int32" in result.summary
    assert "torch.float32" in result.summary
    verdicts = {check.name: check.verdict for check in result.checks}
    assert (verdicts["contract"], verdicts["band"]) == ("discrepancy", "failed")
