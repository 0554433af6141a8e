"""What ``standard`` promises: segments or slabs, -1 on padding, rows that stay where they are."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from moe.fold import fold_topk_weights
from moe.formats import Stage
from reports.verdict.judge import Judge
from tests.verdict.clean_runs import run_clean
from tests.verdict.layouts import LAYOUTS

CONTIG = "dp_ep_reduce_scatter_v"
MASKED = "masked_max_len"
ROWS = "rows.m_indices"


def found(run, rank, tensors, check="contract", stage=Stage.PRE_PERMUTE):
    deviations = run.judged(run.changed(stage, rank, tensors)).deviations
    return [one for one in deviations if one.check == check]


def test_padding_that_carries_an_expert_is_found(clean_layout):
    run = clean_layout(CONTIG)
    experts = run.tensor(Stage.PRE_PERMUTE, 2, ROWS).clone()
    padding = int((experts == -1).nonzero()[0])
    experts[padding] = experts[padding - 1]
    (one,) = found(run, 2, {ROWS: experts})
    assert (one.stage, one.rank, one.tensor) == (Stage.PRE_PERMUTE, 2, ROWS)


@pytest.mark.parametrize("rows", [-32, 32], ids=["fewer", "more"])
def test_another_number_of_rows_than_the_bound_is_found(clean_layout, rows):
    """17 rows of 6 slots, 2 local experts, blocks of 64: 2 blocks begun, 1 full one more."""
    run = clean_layout(CONTIG)
    experts = run.tensor(Stage.PRE_PERMUTE, 2, ROWS)
    assert len(experts) == 192
    other = torch.cat([experts, experts.new_full((32,), -1)])[: 192 + rows]
    assert ROWS in {one.tensor for one in found(run, 2, {ROWS: other})}


@pytest.mark.parametrize("off", [1, -1])
def test_a_slabs_count_that_is_not_its_routes_is_located(clean_layout, off):
    run = clean_layout(MASKED)
    counts = run.tensor(Stage.PRE_PERMUTE, 3, "rows.masked_m").clone()
    routes = int(counts[1])
    counts[1] += off
    first = found(run, 3, {"rows.masked_m": counts})[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.PRE_PERMUTE, 3, "rows.masked_m")
    assert (first.expert, first.got, first.want) == (7, routes + off, routes)


def test_slabs_of_another_height_are_found(clean_layout):
    """8 rows want slabs of 256; all grouped tensors of the rank are as high, so shapes agree."""
    run = clean_layout(MASKED)
    rank, stages = 3, dict(run.traces[3].stages)
    for stage in (Stage.PRE_PERMUTE, Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2):
        stages[stage] = {name: higher(name, tensor) for name, tensor in stages[stage].items()}
    index = stages[Stage.PRE_PERMUTE]["restore.output_index"]
    moved = torch.where(index >= 0, index // 256 * 512 + index % 256, index)
    stages[Stage.PRE_PERMUTE]["restore.output_index"] = moved
    traces = list(run.traces)
    traces[rank] = type(traces[rank])(rank=rank, stages=stages)
    (one,) = [d for d in run.judged(traces).deviations if d.tensor == "rows.hidden_states"]
    assert one.detail == "slabs of 512 rows, 256 are due"


def higher(name, tensor):
    """Slabs twice as high, with the same layout in memory; anything else as it is."""
    if tensor.dim() != 3:
        return tensor
    slabs, height, width = tensor.shape
    if name.endswith("_scale"):
        taller = tensor.new_zeros(slabs, width, 2 * height).transpose(1, 2)
    else:
        taller = torch.zeros(slabs, 2 * height, width, dtype=tensor.dtype)
    taller[:, :height].copy_(tensor)
    return taller


def test_a_way_back_without_a_route_is_found(clean_layout):
    run = clean_layout(CONTIG)
    index = run.tensor(Stage.PRE_PERMUTE, 2, "restore.output_index").clone()
    row, slot = (index < 0).nonzero()[0].tolist()
    index[row, slot] = 5
    first = found(run, 2, {"restore.output_index": index})[0]
    assert (first.rank, first.tensor) == (2, "restore.output_index")
    assert (first.token, first.slot) == (run.layer_token(2, row), slot)


def test_a_local_route_without_a_grouped_row_was_not_computed(clean_layout):
    run = clean_layout(MASKED)
    route = run.route(1)
    index = run.tensor(Stage.PRE_PERMUTE, 1, "restore.output_index").clone()
    index[route.received, route.slot] = -1
    first = found(run, 1, {"restore.output_index": index}, check="accounts")[0]
    assert (first.stage, first.rank, first.expert) == (Stage.PRE_PERMUTE, 1, route.expert)
    assert first.got == first.want - 1


def test_a_global_id_left_in_place_of_a_local_one_is_found(clean_layout):
    """Rank 2 holds slots 4 and 5; ids that nobody made local compute other experts."""
    run = clean_layout(CONTIG)
    physical = run.tensor(Stage.DISPATCH, 2, "physical_ids")
    moves = found(run, 2, {"topk_ids": physical.clone()}, "contract: moves", Stage.DISPATCH)
    assert {(one.rank, one.tensor) for one in moves if one.stage is Stage.DISPATCH} == {
        (2, "topk_ids")
    }


@pytest.mark.parametrize(
    ("layout", "due"),
    [(MASKED, torch.float32), ("local_shared_expert", torch.bfloat16), (CONTIG, torch.bfloat16)],
    ids=["slabs, clamped", "slabs, not clamped", "segments"],
)
def test_the_activation_is_stored_as_its_kernel_stores_it(clean_layout, layout, due):
    run = clean_layout(layout)
    activation = run.tensor(Stage.ACTIVATION, 0, "activation")
    assert activation.dtype == due
    other = torch.bfloat16 if due == torch.float32 else torch.float32
    stored = found(run, 0, {"activation": activation.to(other)}, stage=Stage.ACTIVATION)
    assert [one.detail for one in stored] == [f"stored as {other}; {due} is due"]


def test_a_factor_that_is_not_folded_in_is_an_error_of_post_permute(clean_layout):
    run = clean_layout(CONTIG)
    partial = run.tensor(Stage.POST_PERMUTE, 2, "partial")
    bare = (partial.float() / run.resolved.judged.routed_scaling_factor).to(torch.bfloat16)
    first = found(run, 2, {"partial": bare}, "band", Stage.POST_PERMUTE)[0]
    assert (first.stage, first.rank) == (Stage.POST_PERMUTE, 2)
    assert first.got == pytest.approx(first.want / 1.5, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(Stage.PRE_PERMUTE, "rows.hidden_states"), (Stage.ACTIVATION, "hidden_states")],
    ids=["pre_permute", "activation"],
)
def test_packed_scales_of_slabs_have_to_be_mn_major(clean_layout, stage, name):
    run = clean_layout(MASKED)
    scale = run.tensor(stage, 0, f"{name}_scale").clone(memory_format=torch.contiguous_format)
    (one,) = found(run, 0, {f"{name}_scale": scale}, stage=stage)
    assert (one.stage, one.rank, one.tensor) == (stage, 0, name)
    assert "MN-major" in one.detail


CAPPED = "capped"
ZEROED = "zeroed"
UNROUTED = "unrouted"
WIDE = "wide"
SWITCHED = {
    CAPPED: (
        *LAYOUTS[MASKED].settings,
        "moe.switches.masked_m_cap=true",
        "batch.tokens=[130, 128]",
    ),
    ZEROED: (*LAYOUTS[CONTIG].settings, "platform=sm90", "moe.switches.deterministic=true"),
    UNROUTED: (
        *LAYOUTS[MASKED].settings,
        "batch.tokens=[4, 1]",
        "batch.padding=max_len",
        "moe.switches.mask_dp_pad_moe=true",
    ),
    WIDE: (
        *LAYOUTS["pure_tp"].settings,
        "moe.recipe=fp8_block128",
        "platform=sm120",
        "moe.shared_experts=replicated",
        "model.overrides.moe_intermediate_size=256",
        "model.overrides.hidden_size=128",
        "model.overrides.num_experts_per_tok=2",
        "model.overrides.n_routed_experts=4",
        "batch.tokens=[1025]",
    ),
}


@cache
def switched(name):
    return run_clean(*SWITCHED[name])


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switch_leaves_no_deviation(name):
    assert switched(name).judged().deviations == []


@pytest.mark.parametrize(
    ("switch", "due"), [({"caps_slabs": True}, 256), ({"caps_slabs": False}, 512)], ids=str
)
def test_slabs_are_as_high_as_the_switch_says(switch, due):
    """260 rows want slabs of 512, the fullest expert's rows 256."""
    run = switched(CAPPED)
    judge = Judge(replace(run.resolved.judged, **switch))
    heights = {d.detail for d in run.judged(judge=judge).deviations if d.check == "contract"}
    wrong = {"slabs of 256 rows, 512 are due"} if due == 512 else set()
    assert heights == wrong


@pytest.mark.parametrize("name", ["rows.hidden_states", "rows.hidden_states_scale"])
def test_padding_that_should_be_zero_and_is_not_is_found(name):
    run = switched(ZEROED)
    rows = run.tensor(Stage.PRE_PERMUTE, 2, name).clone()
    padding = int((run.tensor(Stage.PRE_PERMUTE, 2, ROWS) < 0).nonzero()[0])
    rows.view(torch.uint8)[padding, 3] = 1
    (one,) = found(run, 2, {name: rows})
    assert (one.rank, one.tensor) == (2, name)
    assert one.detail == f"padding row {padding} is not zero; 1 such rows"


def test_padding_that_nobody_zeroed_may_hold_anything():
    run = switched(ZEROED)
    rows = run.tensor(Stage.PRE_PERMUTE, 2, "rows.hidden_states").clone()
    padding = int((run.tensor(Stage.PRE_PERMUTE, 2, ROWS) < 0).nonzero()[0])
    rows.view(torch.uint8)[padding, 3] = 1
    traces = run.changed(Stage.PRE_PERMUTE, 2, {"rows.hidden_states": rows})
    judge = Judge(replace(run.resolved.judged, zeroes_padding=False))
    assert run.judged(traces, judge=judge).deviations == []


def test_a_padded_row_that_keeps_its_local_ids_is_found():
    """The second group's slot of four rows holds one token; its padding is in rows 5 to 7."""
    run = switched(UNROUTED)
    ids = run.tensor(Stage.DISPATCH, 0, "topk_ids").clone()
    assert ids[5:].tolist() == [[-1] * 6] * 3
    physical = run.tensor(Stage.DISPATCH, 0, "physical_ids")
    ids[6] = torch.where(physical[6] < 2, physical[6], -1)
    assert bool((ids[6] >= 0).any())
    moves = found(run, 0, {"topk_ids": ids}, "contract: moves", Stage.DISPATCH)
    (one,) = [one for one in moves if one.stage is Stage.DISPATCH]
    assert (one.rank, one.tensor, one.token) == (0, "topk_ids", None)


def test_without_the_switch_padded_rows_are_due_with_their_routes():
    run = switched(UNROUTED)
    judge = Judge(replace(run.resolved.judged, masks_slots=False))
    stages = {one.stage for one in run.judged(judge=judge).deviations}
    assert Stage.DISPATCH in stages


def test_sm120s_segments_have_a_block_to_spare():
    """1025 rows of 2 slots are 17 blocks of 128, and 4 experts have one more each."""
    run = switched(WIDE)
    experts = run.tensor(Stage.PRE_PERMUTE, 1, ROWS)
    assert len(experts) == 21 * 128
    (one,) = found(run, 1, {ROWS: experts[:-128]})[:1]
    assert (one.rank, one.tensor) == (1, ROWS)


def test_sm120_stores_the_sum_before_the_factor_and_after_it():
    """A band with one rounding does not hold what two have made."""
    run = switched(WIDE)
    judge = Judge(replace(run.resolved.judged, wide_segments=False))
    deviations = run.judged(judge=judge).deviations
    assert {one.tensor for one in deviations if one.check == "band"} == {"partial"}


def test_a_sum_that_sm120_does_not_store_before_the_factor_is_found():
    """Nor does what two roundings may leave hold what one has made."""
    run = switched(WIDE)
    rank = run.last_rank
    traced = run.traces[rank][Stage.PRE_PERMUTE]
    index = traced["restore.output_index"]
    partial = fold_topk_weights(
        run.tensor(Stage.GEMM2, rank, "output"),
        index,
        traced["restore.topk_weights"],
        index >= 0,
        factor=run.resolved.judged.routed_scaling_factor,
    )
    first = run.first(Stage.POST_PERMUTE, rank, "partial", partial)
    assert (first.check, first.stage, first.rank) == ("band", Stage.POST_PERMUTE, rank)
