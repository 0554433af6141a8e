"""What each boundary promises: a broken promise is found where it was made."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Platform, Stage
from moe.quant.ue8m0 import row_major
from reports.verdict.contracts import block_due
from reports.verdict.judge import Judge


def contracts(clean, traces):
    return [one for one in clean.judged(traces).deviations if one.check == "contract"]


@pytest.mark.parametrize("illegal", [8, 9, 1000, -2], ids=str)
def test_a_routed_id_outside_the_experts_is_found(clean, illegal):
    rank = clean.last_rank
    ids = clean.tensor(Stage.ROUTE, rank, "topk_ids").clone()
    ids[1, 0] = illegal
    first = contracts(clean, clean.changed(Stage.ROUTE, rank, {"topk_ids": ids}))[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.ROUTE, rank, "topk_ids")
    assert (first.token, first.slot) == (clean.own_token(rank, 1), 0)
    assert f"id {illegal} " in first.detail


@pytest.mark.parametrize("illegal", [4, 100, -2], ids=str)
def test_a_received_id_outside_the_local_experts_is_found(clean, illegal):
    rank, route = clean.last_rank, clean.route(clean.last_rank)
    ids = clean.tensor(Stage.DISPATCH, rank, "topk_ids").clone()
    ids[route.received, route.slot] = illegal
    first = contracts(clean, clean.changed(Stage.DISPATCH, rank, {"topk_ids": ids}))[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.DISPATCH, rank, "topk_ids")
    assert (first.token, first.slot) == (route.token, route.slot)


@pytest.mark.parametrize("off", [1, -1, 128, -128], ids=str)
def test_an_announced_count_that_is_not_the_routes_is_found(clean, off):
    rank = clean.last_rank
    name = "num_recv_tokens_per_expert"
    counts = clean.tensor(Stage.DISPATCH, rank, name).clone()
    counts[1] += off
    first = contracts(clean, clean.changed(Stage.DISPATCH, rank, {name: counts}))[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.DISPATCH, rank, name)
    assert (first.got, first.want) == (128.0 + off, 128.0)
    assert first.expert == int(clean.tensor(Stage.WEIGHTS, rank, "expert_ids")[1])


@pytest.mark.parametrize("change", ["shorter", "padding of another expert"])
def test_segments_that_are_not_the_announced_ones_are_found(clean, change):
    rank = clean.last_rank
    experts = clean.tensor(Stage.PRE_PERMUTE, rank, "rows.m_indices").clone()
    if change == "shorter":
        experts = experts[:-1]
    else:
        experts[127] = 1
    first = contracts(clean, clean.changed(Stage.PRE_PERMUTE, rank, {"rows.m_indices": experts}))[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.PRE_PERMUTE, rank, "rows.m_indices")


def test_a_way_back_where_no_route_is_here_is_found(clean):
    rank = clean.last_rank
    index = clean.tensor(Stage.PRE_PERMUTE, rank, "restore.output_index").clone()
    row, slot = (index < 0).nonzero()[0].tolist()
    index[row, slot] = 127
    traces = clean.changed(Stage.PRE_PERMUTE, rank, {"restore.output_index": index})
    first = contracts(clean, traces)[0]
    assert (first.stage, first.rank) == (Stage.PRE_PERMUTE, rank)
    assert (first.token, first.slot) == (clean.received_token(rank, row), slot)
    assert "output_index 127" in first.detail


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (Stage.DISPATCH, "wire"),
        (Stage.DISPATCH, "hidden_states"),
        (Stage.PRE_PERMUTE, "rows.hidden_states"),
        (Stage.ACTIVATION, "hidden_states"),
    ],
    ids=lambda value: str(value),
)
def test_packed_scales_have_to_be_mn_major(clean_ue8m0, stage, name):
    scale = row_major(clean_ue8m0.tensor(stage, 0, f"{name}_scale"))
    found = contracts(clean_ue8m0, clean_ue8m0.changed(stage, 0, {f"{name}_scale": scale}))
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(stage, 0, name)]
    assert "MN-major" in found[0].detail


@pytest.mark.parametrize(
    ("stage", "name"),
    [(Stage.PRE_PERMUTE, "rows.hidden_states"), (Stage.ACTIVATION, "hidden_states")],
    ids=lambda value: str(value),
)
def test_scales_of_another_dtype_are_found(clean_fp32, stage, name):
    scale = clean_fp32.tensor(stage, 0, f"{name}_scale").to(torch.float64)
    found = contracts(clean_fp32, clean_fp32.changed(stage, 0, {f"{name}_scale": scale}))
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(stage, 0, name)]
    assert "float64" in found[0].detail


UNROUNDED = [
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "activation"),
    (Stage.GEMM2, "output"),
    (Stage.POST_PERMUTE, "partial"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
]


@pytest.mark.parametrize(("stage", "name"), UNROUNDED, ids=lambda value: str(value))
def test_a_store_that_is_left_out_is_found_though_every_value_is_in_its_band(clean, stage, name):
    wide = clean.tensor(stage, 0, name).to(torch.float32)
    found = contracts(clean, clean.changed(stage, 0, {name: wide}))
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(stage, 0, name)]
    assert "torch.float32; torch.bfloat16 is due" in found[0].detail


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_routed_ids_of_another_dtype_are_found(clean, dtype):
    ids = clean.tensor(Stage.ROUTE, 0, "topk_ids").to(dtype)
    found = contracts(clean, clean.changed(Stage.ROUTE, 0, {"topk_ids": ids}))
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(Stage.ROUTE, 0, "topk_ids")]


@pytest.mark.parametrize("name", ["shared.gate_up", "shared.activation", "shared.output"])
def test_a_bf16_store_left_out_of_the_shared_expert_is_found(clean, name):
    rank = clean.last_rank
    wide = clean.tensor(Stage.TAIL, rank, name).float()
    traces = clean.changed(Stage.TAIL, rank, {name: wide})
    found = [one for one in clean.judged(traces).deviations if one.check == "contract"]
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(Stage.TAIL, rank, name)]


def test_a_shared_expert_that_skips_its_quantiser_is_found_on_every_rank(quantised):
    traces = []
    for trace in quantised.traces:
        tail = {k: v for k, v in trace[Stage.TAIL].items() if k != "shared.input_scale"}
        tail["shared.input"] = trace[Stage.GLUE_IN]["hidden_states"]
        traces.append(replace(trace, stages={**trace.stages, Stage.TAIL: tail}))
    found = [one for one in quantised.judged(traces).deviations if one.check == "contract"]
    assert [(one.stage, one.rank, one.tensor) for one in found] == [
        (Stage.TAIL, rank, "shared.input") for rank in range(len(traces))
    ]


def test_a_shared_expert_on_a_rank_that_should_add_none_breaks_a_contract(clean_layout):
    run = clean_layout("dp_ep_reduce_scatter_v")
    found = run.judged(run.changed(Stage.TAIL, 1, run.traces[0][Stage.TAIL])).deviations
    broken = next(one for one in found if one.check == "contract")
    assert (broken.stage, broken.rank, broken.tensor) == (Stage.TAIL, 1, "shared.output")


@pytest.mark.parametrize(
    ("platform", "routes", "slots", "due"),
    [
        ("sm90", 1, 8, 128),
        ("sm90", 4096, 8, 128),
        ("sm100", 0, 8, 32),
        ("sm100", 8 * 32, 8, 32),
        ("sm100", 8 * 32 + 1, 8, 64),
        ("sm100", 8 * 96, 8, 96),
        ("sm100", 8 * 97, 8, 128),
        ("sm100", 8 * 1000, 8, 128),
        ("sm120", 8 * 64, 8, 64),
        ("sm120", 8 * 65, 8, 128),
        ("sm120", 8 * 1000, 8, 128),
    ],
)
def test_a_block_is_the_librarys_answer(platform, routes, slots, due):
    assert block_due(Platform(platform), routes, slots) == due


def test_segments_of_another_alignment_are_found(clean):
    layer = replace(clean.resolved.judged, row_alignment=64)
    deviations = Judge(layer).check(clean.batch, clean.traces, clean.calls).deviations
    assert any("aligned to 64 rows, 128 is due" in one.detail for one in deviations)
