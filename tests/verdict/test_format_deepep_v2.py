"""What deepep_v2 promises in each of its forms; what breaks it is found where it was broken."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict.readable import UnreadableTraceError
from tests.verdict.clean_runs import CleanRun
from tests.verdict.deepep_v2_runs import EVERY_TENSOR, EXPANDED, FORMS, found, spoiled


@pytest.mark.parametrize("form", FORMS)
def test_a_clean_run_has_no_deviation(clean_form, form):
    assert clean_form(form).judged().deviations == []


@pytest.mark.parametrize(("form", "stage", "name"), EVERY_TENSOR)
def test_a_spoiled_tensor_is_objected_to_at_its_own_stage_and_rank(clean_form, form, stage, name):
    run = clean_form(form)
    deviations = run.judged(run.changed(stage, 2, {name: spoiled(run, stage, 2, name)})).deviations
    assert deviations, "nobody objects"
    assert deviations[0].stage is stage
    names = {name, name.removeprefix("rows."), name.removesuffix("_scale")}
    names |= {"rows"} if name == "rows.m_indices" else set()
    named = [one for one in deviations if one.stage is stage and one.tensor in names]
    assert {one.rank for one in named} == {2}


# Dummies.


def dummy_row(run: CleanRun, rank: int) -> int:
    source = run.tensor(Stage.DISPATCH, rank, "handle.source_rank")
    (row,) = (source == 1).nonzero()[:, 0].tolist()
    return row


@pytest.mark.parametrize("rank", range(4))
def test_the_dummy_of_an_idle_rank_stands_where_the_first_slots_are(clean_form, rank):
    source = clean_form("tokens").tensor(Stage.DISPATCH, rank, "handle.source_rank")
    assert int((source == 1).sum()) == (0 if rank == 3 else 1)


def test_a_dummy_that_is_missing_is_found(clean_form):
    run = clean_form("tokens")
    name, at = "handle.source_rank", dummy_row(run, 2)
    source = run.tensor(Stage.DISPATCH, 2, name).clone()
    source[at] = 3
    first = found(run, Stage.DISPATCH, 2, {name: source}, "accounts")
    (one,) = [d for d in first if d.tensor == name]
    assert (one.stage, one.rank, one.got, one.want) == (Stage.DISPATCH, 2, 0.0, 1.0)
    assert "dummy of rank 1" in one.detail


def test_a_dummy_that_stands_in_for_a_token_is_found(clean_form):
    run = clean_form("tokens")
    token = run.route(2).received
    changed = {}
    for name, value in (("handle.source_rank", 1), ("handle.source_row", 0)):
        changed[name] = run.tensor(Stage.DISPATCH, 2, name).clone()
        changed[name][token] = value
    accounts = found(run, Stage.DISPATCH, 2, changed, "accounts")
    assert {(d.tensor, d.got, d.want) for d in accounts if d.tensor.startswith("handle")} == {
        ("handle.source_rank", 2.0, 1.0),
        ("handle.source_row", 0.0, 1.0),
    }


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("hidden_states", "quantiser rule"),
        ("hidden_states_scale", "quantiser rule"),
        ("topk_ids", "contract: moves"),
        ("topk_weights", "contract: moves"),
    ],
)
def test_a_dummy_that_is_not_nothing_is_found(clean_form, name, check):
    run = clean_form("tokens")
    tensor = run.tensor(Stage.DISPATCH, 2, name)
    changed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    cells = changed[dummy_row(run, 2)]
    cells = cells.view(torch.uint8) if cells.dtype == torch.float8_e4m3fn else cells
    cells[0] = 1 - cells[0]
    first = found(run, Stage.DISPATCH, 2, {name: changed}, check)[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.DISPATCH, 2, name)


@pytest.mark.parametrize(("source", "row"), [(1, 1), (4, 0), (-1, 0), (0, 5)], ids=str)
def test_a_row_of_no_rank_cannot_be_judged(clean_form, source, row):
    run = clean_form("tokens")
    named = {"handle.source_rank": source, "handle.source_row": row}
    changed = {name: run.tensor(Stage.DISPATCH, 2, name).clone() for name in named}
    for name, value in named.items():
        changed[name][0] = value
    with pytest.raises(UnreadableTraceError, match=f"from row {row} of rank {source}, which"):
        run.judged(run.changed(Stage.DISPATCH, 2, changed))


def test_dummies_alone_make_segments(clean_form):
    run = clean_form("nobody")
    psum = [run.tensor(Stage.DISPATCH, rank, "psum").tolist() for rank in range(4)]
    assert psum == [[128, 256], [128, 256], [128, 256], [0, 0]]


def test_ends_of_segments_without_dummies_are_found(clean_form):
    run = clean_form("nobody")
    psum = torch.zeros(2, dtype=torch.int32)
    one, other = [
        d
        for d in found(run, Stage.DISPATCH, 0, {"psum": psum}, "contract")
        if d.stage is Stage.DISPATCH
    ]
    assert [(d.tensor, d.got, d.want) for d in (one, other)] == [
        ("psum", 0.0, 128.0),
        ("psum", 0.0, 256.0),
    ]


@pytest.mark.parametrize("form", ["tokens", *EXPANDED])
def test_bytes_are_those_of_a_row_for_each_rank_of_a_tokens_experts(clean_form, form):
    """Row: 256 codes, 2 scales in a word or two, 6 ids of 8 bytes and weights of 4, a row of 8."""
    run = clean_form(form)
    row_bytes = 256 + (8 if form == "slabs" else 4) + 6 * (8 + 4) + 8
    ids = [run.tensor(Stage.ROUTE, rank, "topk_ids").tolist() for rank in range(4)]
    if form == "tokens":
        ids[1] = [[0, 1, 2, 3, 4, 5]]
    owners = [[{expert // 2 for expert in row} for row in rows] for rows in ids]
    for rank in range(4):
        sent = sum(len(ranks) for ranks in owners[rank]) * row_bytes
        back = sum(rank in ranks for rows in owners for ranks in rows) * 256 * 2
        payloads = [call.payload_bytes for call in run.calls[rank] if call.op == "all_to_all_v"]
        assert payloads == [4 * (1 + 2) * 8, sent, back]


@pytest.mark.parametrize("form", ["tokens", *EXPANDED])
@pytest.mark.parametrize("call", [0, 1, 2], ids=["counts", "rows", "partials"])
def test_payload_of_another_size_is_found(clean_form, form, call):
    run = clean_form(form)
    calls = [list(made) for made in run.calls]
    at = [i for i, one in enumerate(calls[1]) if one.op == "all_to_all_v"][call]
    calls[1][at] = replace(calls[1][at], payload_bytes=calls[1][at].payload_bytes + 2)
    (one,) = [d for d in run.judged(calls=calls).deviations if d.check == "accounts"]
    assert (str(one.stage), one.rank, one.tensor) == (calls[1][at].stage, 1, "payload")
