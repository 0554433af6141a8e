"""What the low-latency formats promise: a row, a weight or a sum that is wrong is named."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict.ledger import MOVES
from reports.verdict.rules import QUANTISER
from tests.verdict.clean_runs import CleanRun
from tests.verdict.low_latency_runs import (
    RANK,
    SETTINGS,
    SlabRow,
    bumped,
    copy_of,
    expert_of,
    found,
    low_latency_run,
    slab_rows,
    token_of,
)

ROW_BYTES = {"ue8m0": 256 + 4, "fp32": 256 + 2 * 4, "bf16": 2 * 256, "bf16 wire": 2 * 256}
"""256 columns: codes with a word of two exponents, or with two scales; or bf16."""


@pytest.fixture(params=SETTINGS)
def name(request) -> str:
    return request.param


@pytest.fixture
def run(name) -> CleanRun:
    return low_latency_run(name)


def test_a_clean_run_has_no_deviation(run):
    assert run.judged().deviations == []


def test_every_stage_of_every_rank_with_rows_is_compared(run):
    entered = run.judged().worst
    for rank in (0, 2, 3):
        assert {(stage, rank) for stage in Stage} <= set(entered)
    idle = {(stage, 1) for stage in (Stage.DISPATCH, Stage.PRE_PERMUTE, Stage.POST_PERMUTE)}
    assert idle <= set(entered)


ROWS = {
    (Stage.DISPATCH, "hidden_states"): ("hidden_states",),
    (Stage.DISPATCH, "hidden_states_scale"): ("hidden_states_scale",),
    (Stage.PRE_PERMUTE, "rows.hidden_states"): ("hidden_states", "rows.hidden_states"),
    (Stage.PRE_PERMUTE, "rows.hidden_states_scale"): (
        "hidden_states_scale",
        "rows.hidden_states_scale",
    ),
    (Stage.POST_PERMUTE, "partial"): ("partial",),
}
"""Tensors of slab rows, and what a finding may call them."""


WITHOUT_SCALES = {
    ("bf16", Stage.DISPATCH),
    ("bf16", Stage.PRE_PERMUTE),
    ("bf16 wire", Stage.DISPATCH),
}


@pytest.mark.parametrize(
    ("name", "stage", "tensor"),
    [
        pytest.param(name, *row, id="-".join((name, *row)))
        for name in SETTINGS
        for row in ROWS
        if not (row[1].endswith("_scale") and (name, row[0]) in WITHOUT_SCALES)
    ],
    indirect=["name"],
)
@pytest.mark.parametrize("index", [0, -1], ids=["first row", "last row"])
def test_a_changed_row_is_named_by_token_and_expert(run, stage, tensor, index):
    row = list(slab_rows(run))[index]
    changed = bumped(run.tensor(stage, RANK, tensor), (row.slot, row.row))
    first, *_ = here = found(run, stage, **{tensor.replace(".", "__"): changed})
    assert {(one.stage, one.rank) for one in here if one.stage is stage} == {(stage, RANK)}
    assert first.tensor in ROWS[stage, tensor]
    assert (first.token, first.expert) == (token_of(run, row), expert_of(run, row.slot))


OF_OWN_ROWS = (
    (Stage.DISPATCH, "topk_weights"),
    (Stage.DISPATCH, "handle.topk_ids"),
    (Stage.PRE_PERMUTE, "restore.topk_weights"),
    (Stage.POST_PERMUTE, "pending_weights"),
    (Stage.COMBINE, "routed"),
)


@pytest.mark.parametrize(("stage", "tensor"), OF_OWN_ROWS, ids=lambda value: str(value))
def test_a_change_of_what_belongs_to_own_rows_is_named_by_token(run, stage, tensor):
    changed = bumped(run.tensor(stage, RANK, tensor), (1,))
    first, *_ = here = found(run, stage, **{tensor.replace(".", "__"): changed})
    assert {(one.rank, one.tensor) for one in here if one.stage is stage} == {(RANK, tensor)}
    assert (first.stage, first.token) == (stage, run.layer_token(RANK, 1))


def test_an_id_that_names_another_slot_is_found(run):
    ids = run.tensor(Stage.DISPATCH, RANK, "physical_ids").clone()
    ids[1, 2] = (ids[1, 2] + 1) % 8
    here = found(run, Stage.DISPATCH, physical_ids=ids)
    assert here[0].stage is Stage.DISPATCH
    assert (RANK, run.layer_token(RANK, 1), 2) in {
        (one.rank, one.token, one.slot) for one in here if one.tensor == "physical_ids"
    }


def copies(run: CleanRun) -> list[tuple[int, SlabRow]]:
    """(rank, row) of every copy of the first token that several ranks hold."""
    by_token: dict[int, list[tuple[int, SlabRow]]] = {}
    for rank in range(4):
        for row in slab_rows(run, rank):
            by_token.setdefault(token_of(run, row), []).append((rank, row))
    return next(held for held in by_token.values() if len({rank for rank, _ in held}) > 1)


@pytest.mark.parametrize("index", [0, -1], ids=["first copy", "last copy"])
def test_a_copy_within_its_band_has_to_be_the_others_bits_all_the_same(index):
    run = low_latency_run("fp32")
    rank, row = copies(run)[index]
    scale = copy_of(run.tensor(Stage.DISPATCH, rank, "hidden_states_scale"))
    for places in (1, -2):  # the run's own scale may be a place beside the golden's
        scale[row.slot, row.row].view(torch.int32)[0] += places
        here = found(run, Stage.DISPATCH, rank, hidden_states_scale=scale)
        if not [one for one in here if one.check == QUANTISER]:
            break
    dispatch = [one for one in here if one.stage is Stage.DISPATCH]
    assert {(one.check, one.rank, one.tensor) for one in dispatch} == {
        (MOVES, rank, "hidden_states_scale")
    }
    assert (dispatch[0].token, dispatch[0].expert) == (
        token_of(run, row),
        expert_of(run, row.slot, rank),
    )


TINY = 2.0**-17
"""448 * 2^-17 / 1e-4 = 34.2, so 36; 1e-4 / 448 is rounded up to 2^-22, and 2^-17 / 2^-22 = 32."""


@pytest.mark.parametrize(
    ("name", "code", "scale", "is_legal"),
    [
        ("ue8m0", 32.0, 0x6969, True),
        ("ue8m0", 256.0, 0x6666, False),
        ("fp32", 36.0, 1e-4 / 448, True),
        ("fp32", 448.0, TINY / 448, False),
    ],
    ids=["ue8m0, floor 1e-4", "ue8m0, floor 1e-10", "fp32, floor 1e-4", "fp32, floor 1e-10"],
    indirect=["name"],
)
def test_small_groups_are_due_with_the_floor_of_the_wire(run, code, scale, is_legal):
    traces = list(run.traces)
    for rank, trace in enumerate(traces):
        x, sent = trace[Stage.GLUE_IN], trace[Stage.DISPATCH]
        tiny = {**x, "hidden_states": torch.full_like(x["hidden_states"], TINY)}
        codes = torch.full(sent["hidden_states"].shape, code).to(torch.float8_e4m3fn)
        scales = copy_of(sent["hidden_states_scale"]).fill_(scale)
        quantised = {**sent, "hidden_states": codes, "hidden_states_scale": scales}
        stages = {**trace.stages, Stage.GLUE_IN: tiny, Stage.DISPATCH: quantised}
        traces[rank] = replace(trace, stages=stages)
    dispatch = [one for one in run.judged(traces).deviations if one.stage is Stage.DISPATCH]
    assert {one.check for one in dispatch} == (set() if is_legal else {QUANTISER})


def test_bytes_are_those_of_counts_routes_and_outputs(run, name):
    """8 slots of all ranks; each route has a row number of 8 bytes, its output a place of 8."""
    for rank, tokens in enumerate((5, 0, 7, 3)):
        received = int(run.tensor(Stage.DISPATCH, rank, "masked_m").sum())
        payloads = [call.payload_bytes for call in run.calls[rank] if call.op == "all_to_all_v"]
        assert payloads == [
            8 * 8,
            tokens * 6 * (ROW_BYTES[name] + 8),
            received * (2 * 256 + 8),
        ]


@pytest.mark.parametrize("call", [1, 2, 3], ids=["counts", "rows", "outputs"])
def test_payload_of_another_size_is_found(run, call):
    calls = [list(made) for made in run.calls]
    calls[RANK][call] = replace(
        calls[RANK][call], payload_bytes=calls[RANK][call].payload_bytes + 8
    )
    (one,) = run.judged(calls=calls).deviations
    assert (one.check, one.rank, one.tensor) == ("accounts", RANK, "payload")
    assert one.got == one.want + 8


@pytest.mark.parametrize("factor", ["twice", "never"])
def test_weights_that_combine_applies_twice_or_never_are_an_error_of_combine(run, factor):
    weights = run.tensor(Stage.POST_PERMUTE, RANK, "pending_weights").double()
    weights = weights**2 if factor == "twice" else torch.ones_like(weights)
    total = torch.zeros(3, 256, dtype=torch.float64)
    ids = run.tensor(Stage.DISPATCH, RANK, "physical_ids")
    for rank in range(4):
        partial = run.tensor(Stage.POST_PERMUTE, rank, "partial").double()
        for row in slab_rows(run, rank):
            if row.source == RANK:
                slot = ids[row.source_row].tolist().index(rank * 2 + row.slot)
                total[row.source_row] += weights[row.source_row, slot] * partial[row.slot, row.row]
    first = found(run, Stage.COMBINE, routed=total.to(torch.bfloat16))[0]
    assert (first.check, first.stage, first.rank) == ("band", Stage.COMBINE, RANK)


def test_a_term_that_is_added_with_another_tokens_row_is_an_error_of_combine(run):
    routed = run.tensor(Stage.COMBINE, RANK, "routed").flip(0)
    first = found(run, Stage.COMBINE, routed=routed)[0]
    assert (first.check, first.stage, first.rank) == ("band", Stage.COMBINE, RANK)


@pytest.mark.parametrize(
    ("name", "is_quantised"),
    [("ue8m0", True), ("fp32", True), ("bf16", False), ("bf16 wire", False)],
    indirect=["name"],
)
def test_the_view_follows_the_wire(run, is_quantised):
    assert run.view.quantised == (("hidden_states",) if is_quantised else ())
    assert run.view.low_latency_wire is is_quantised
