"""What ``standard`` promises: segments or slabs, -1 on padding, rows that stay where they are."""

import pytest
import torch

from moe.formats import Stage

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
