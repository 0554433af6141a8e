"""Exact mode is silent on what is right, and sees one bf16 place in any certified cell, once."""

from collections.abc import Iterator

import pytest
import torch

from moe.formats import Stage
from reports.verdict import route_values
from reports.verdict.deviation import NotAsked
from reports.verdict.exact_compared import EXACT, of_rows
from reports.verdict.exact_rows import CertainRows
from reports.verdict.rows import Rows
from tests.verdict.clean_runs import CleanRun, run_clean
from tests.verdict.exact_runs import (
    EXACT_RUNS,
    clean_judgement,
    compared,
    exact_deviations,
    exact_run,
    judged,
)

COMPARED = {
    Stage.GLUE_IN: ("hidden_states",),
    Stage.ROUTE: ("topk_weights",),
    Stage.DISPATCH: ("hidden_states", "hidden_states_scale"),
    Stage.PRE_PERMUTE: ("rows.hidden_states", "rows.hidden_states_scale"),
    Stage.GEMM1: ("gate_up",),
    Stage.ACTIVATION: ("activation", "hidden_states", "hidden_states_scale"),
    Stage.GEMM2: ("output",),
    Stage.POST_PERMUTE: ("partial",),
    Stage.COMBINE: ("routed",),
    Stage.TAIL: (
        "shared.input",
        "shared.gate_up",
        "shared.hidden_states",
        "shared.output",
        "output",
    ),
    Stage.GLUE_OUT: ("hidden_states",),
}


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_a_clean_run_has_no_deviation(name):
    judgement = clean_judgement(name)
    assert judgement.ledger.deviations == []
    assert EXACT in judgement.ledger.asked


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_the_output_is_the_goldens_in_every_certified_cell(name):
    judgement = clean_judgement(name)
    differs = judgement.output.double() != judgement.same_recipe.output
    assert not bool((differs & judgement.certificate.output_cells).any())


def test_ranks_in_parts_are_compared_as_all_at_once(monkeypatch):
    whole, run = clean_judgement("ue8m0"), exact_run("ue8m0")
    monkeypatch.setattr(route_values, "CELLS_AT_ONCE", 1)
    parts = judged(run, run.traces)
    assert parts.certificate.stages == whole.certificate.stages
    output = run.tensor(Stage.GEMM2, 2, "output").clone()
    output.flatten()[:] = 1.0
    found = compared("ue8m0", run.changed(Stage.GEMM2, 2, {"output": output}))
    assert (found[0].stage, found[0].rank) == (Stage.GEMM2, 2)


def places(name: str) -> Iterator[tuple[str, Stage, str]]:
    """Tensors that are compared in a run and leave one stage to another on rank 0."""
    run = exact_run(name)
    for stage, tensors in COMPARED.items():
        for tensor in tensors:
            if tensor in run.traces[0][stage] and not silent(run, stage, tensor):
                yield name, stage, tensor


def silent(run: CleanRun, stage: Stage, tensor: str) -> bool:
    """Not compared: a rank's part of a sum, or what a kernel did not store."""
    of_all = (Stage.COMBINE, "routed"), (Stage.TAIL, "output")
    is_part = not run.resolved.judged.is_all_to_all and (stage, tensor) in of_all
    return is_part or (
        run.tensor(stage, 0, tensor).dtype == torch.float32 and tensor == "activation"
    )


@pytest.mark.parametrize(
    ("name", "stage", "tensor"),
    [
        pytest.param(*place, id=" ".join(map(str, place)))
        for name in ("ue8m0", "slabs", "partials")
        for place in places(name)
    ],
)
def test_a_changed_cell_is_found_at_its_stage_and_rank(name, stage, tensor):
    """All cells one last place up; those of padding as well, which nobody compares."""
    run = exact_run(name)
    right = run.tensor(stage, 0, tensor)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[right.element_size()]
    wrong = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype)
    wrong.copy_(right)
    wrong.view(bits).add_(1)
    found = compared(name, run.changed(stage, 0, {tensor: wrong}))
    assert {(one.stage, one.rank) for one in found} == {(stage, 0)}
    assert tensor in {one.tensor for one in found}


def test_what_an_earlier_stage_did_is_blamed_there_once():
    """A wrong expert shows in GEMM1; prepared weights have been found wrong before."""
    run = exact_run("ue8m0")
    held = run.tensor(Stage.WEIGHTS, 0, "experts.w13.values")
    swapped = held.view(torch.uint8).flip(0).view(held.dtype)
    gate_up = run.tensor(Stage.GEMM1, 0, "gate_up")
    traces = list(run.changed(Stage.WEIGHTS, 0, {"experts.w13.values": swapped}))
    traces[0] = CleanRun.changed(run, Stage.GEMM1, 0, {"gate_up": -gate_up})[0]
    traces[0].stages[Stage.WEIGHTS] = {
        **run.traces[0][Stage.WEIGHTS],
        "experts.w13.values": swapped,
    }
    judge_anew = type(run.judge)(run.resolved.judged)
    (one,) = exact_deviations(judge_anew.judge(run.batch, traces, run.calls))
    assert (one.stage, one.rank) == (Stage.WEIGHTS, 0)
    assert one.detail.startswith("inherited: certified cells of gate_up differ in stage gemm1")


def test_stages_behind_the_first_difference_are_not_blamed():
    run = exact_run("ue8m0")
    traces = run.changed(Stage.GEMM1, 0, {"gate_up": -run.tensor(Stage.GEMM1, 0, "gate_up")})
    traces[3] = run.changed(
        Stage.GLUE_OUT, 3, {"hidden_states": -run.tensor(Stage.GLUE_OUT, 3, "hidden_states")}
    )[3]
    found = compared("ue8m0", traces)
    assert {(one.stage, one.rank) for one in found} == {(Stage.GEMM1, 0)}


def test_the_sign_of_zero_is_no_difference():
    run = exact_run("bf16")
    output = run.tensor(Stage.GLUE_OUT, 0, "hidden_states")
    assert bool((output == 0).any())
    flipped = torch.where(output == 0, -output, output)
    assert compared("bf16", run.changed(Stage.GLUE_OUT, 0, {"hidden_states": flipped})) == []


def test_a_tensor_in_another_form_than_due_is_left_out_and_named():
    rows = Rows.of_rank(0, 2, torch.arange(2))
    values = torch.ones(2, 4, dtype=torch.float64)
    want = CertainRows.stored(values, values == 1)
    codes = values.to(torch.float8_e4m3fn)
    (left_out,) = of_rows(Stage.DISPATCH, "hidden_states", rows, (codes, None), want)
    assert left_out == NotAsked(
        check=EXACT,
        what="dispatch",
        why="hidden_states is torch.float8_e4m3fn where bf16 are due",
    )


def test_no_route_at_all_is_agreed_upon_where_experts_are_cut():
    run = run_clean(
        "inputs.modes=[exact]",
        "parallel.attention={dp: 1, tp: 2}",
        "parallel.moe={ep: 1, tp: 2}",
        "moe.dispatcher=standard",
        "model.overrides.num_experts_per_tok=1",
        "model.overrides.moe_intermediate_size=256",
        "batch.tokens=[1]",
        "batch.routing.kind=dropped",
    )
    judgement = judged(run, run.traces)
    assert judgement.ledger.deviations == []
    assert judgement.same_recipe.topk_ids.tolist() == [[-1]]
    assert EXACT in judgement.ledger.asked
