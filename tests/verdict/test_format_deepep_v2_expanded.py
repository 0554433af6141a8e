"""Expanded rows of deepep_v2: each route in its segment, once, with its weight."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from reports.verdict.readable import UnreadableTraceError
from tests.verdict.clean_runs import CleanRun
from tests.verdict.deepep_v2_runs import EXPANDED, first_real_row, found


@pytest.mark.parametrize("form", EXPANDED)
@pytest.mark.parametrize("off", [-1, 1, 128])
def test_an_end_that_is_not_its_routes_is_located(clean_form, form, off):
    run = clean_form(form)
    psum = run.tensor(Stage.DISPATCH, 3, "psum").clone()
    due = int(psum[1])
    psum[1] += off
    first = found(run, Stage.DISPATCH, 3, {"psum": psum}, "contract")[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.DISPATCH, 3, "psum")
    assert (first.expert, first.got, first.want) == (7, due + off, due)


@pytest.mark.parametrize("form", EXPANDED)
def test_a_route_that_has_no_row_is_named(clean_form, form):
    run = clean_form(form)
    row, _ = first_real_row(run, 0)
    names = [f"handle.source_{part}" for part in ("rank", "row", "slot")]
    source, token_row, slot = (int(run.tensor(Stage.DISPATCH, 0, name)[row]) for name in names)
    changed = {name: run.tensor(Stage.DISPATCH, 0, name).clone() for name in names}
    for tensor in changed.values():
        tensor[row] = -1
    accounts = found(run, Stage.DISPATCH, 0, changed, "accounts")
    lost = next(d for d in accounts if d.tensor == "handle.source_row")
    assert (lost.token, lost.slot) == (run.layer_token(source, token_row), slot)
    assert (lost.rank, lost.got, lost.want) == (0, 0.0, 1.0)
    counted = found(run, Stage.DISPATCH, 0, changed, "contract")
    assert f"row {row} is counted and has no source" in counted[0].detail


@pytest.mark.parametrize("form", EXPANDED)
def test_rows_of_two_experts_exchanged_are_in_wrong_segments(clean_form, form):
    """Rows, weights and sources go together, so only the segment is wrong."""
    run = clean_form(form)
    order = torch.arange(run.tensor(Stage.DISPATCH, 2, "topk_weights").shape[0])
    order[[0, 128]] = order[[128, 0]]
    changed = {}
    for name in ("hidden_states", "hidden_states_scale", "topk_weights"):
        tensor = run.tensor(Stage.DISPATCH, 2, name)
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        as_bytes = torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype
        moved.view(as_bytes).copy_(tensor.view(as_bytes)[order])
        changed[name] = moved
    for part in ("rank", "row", "slot"):
        changed[f"handle.source_{part}"] = run.tensor(Stage.DISPATCH, 2, f"handle.source_{part}")[
            order
        ]
    deviations = run.judged(run.changed(Stage.DISPATCH, 2, changed)).deviations
    at_dispatch = [d for d in deviations if d.stage is Stage.DISPATCH and d.check != "accounts"]
    assert [(d.rank, d.tensor, d.rows) for d in at_dispatch] == [(2, "handle.source_slot", 2)]
    assert at_dispatch[0].token is not None


@pytest.mark.parametrize("form", EXPANDED)
@pytest.mark.parametrize(
    ("part", "value"), [("rank", 4), ("rank", -2), ("row", 9), ("slot", 6), ("slot", -1)], ids=str
)
def test_a_row_of_no_route_of_any_rank_cannot_be_judged(clean_form, form, part, value):
    run = clean_form(form)
    name = f"handle.source_{part}"
    index = run.tensor(Stage.DISPATCH, 2, name).clone()
    index[0] = value
    with pytest.raises(UnreadableTraceError, match=f"{part} {value}.*which does not exist"):
        run.judged(run.changed(Stage.DISPATCH, 2, {name: index}))


def test_weights_of_a_finding_are_of_one_slot(clean_form):
    run = clean_form("slabs")
    row, _ = first_real_row(run, 2)
    weights = run.tensor(Stage.DISPATCH, 2, "topk_weights").clone()
    weights[row] *= 2
    first = found(run, Stage.DISPATCH, 2, {"topk_weights": weights}, "contract: moves")[0]
    assert first.slot == int(run.tensor(Stage.DISPATCH, 2, "handle.source_slot")[row])


# Slabs.


def lower(slabs: Tensor) -> Tensor:
    """60 rows a slab, rows or columns along the fastest axis as before."""
    cut = slabs[:, :60]
    return mn_major(cut) if slabs.stride(1) == 1 else cut.contiguous()


def test_slabs_of_another_height_are_found(clean_form):
    run = clean_form("slabs")
    stages = dict(run.traces[3].stages)
    for stage in (Stage.PRE_PERMUTE, Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2):
        stages[stage] = {
            name: lower(tensor) if tensor.dim() == 3 else tensor
            for name, tensor in stages[stage].items()
        }
    traces = [*run.traces[:3], replace(run.traces[3], stages=stages)]
    (one,) = run.judged(traces).deviations
    assert one.detail == "slabs of 60 rows, 64 are due"
    assert (one.stage, one.rank, one.tensor) == (Stage.PRE_PERMUTE, 3, "rows.hidden_states")


@pytest.mark.parametrize("form", EXPANDED)
def test_a_buffer_of_another_size_is_found(clean_form, form):
    """4 * 16 * min(6, 2) + 127 * 2 = 382 rows, in whole 128s."""
    run = clean_form(form)
    stages = dict(run.traces[3].stages)
    for stage in (Stage.DISPATCH, Stage.PRE_PERMUTE, Stage.POST_PERMUTE):
        stages[stage] = {
            name: longer(tensor) if tensor.shape[:1] == (384,) else tensor
            for name, tensor in stages[stage].items()
        }
    if form == "in place":
        for stage in (Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2):
            stages[stage] = {name: longer(tensor) for name, tensor in stages[stage].items()}
    traces = [*run.traces[:3], replace(run.traces[3], stages=stages)]
    (one,) = run.judged(traces).deviations
    assert one.detail == "a buffer of 512 rows, 384 are due"
    assert (one.stage, one.rank, one.tensor) == (Stage.DISPATCH, 3, "hidden_states")


def longer(tensor: Tensor) -> Tensor:
    """512 rows where there were 384: the new ones hold -1, in the same memory layout."""
    if tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.dtype == torch.int32:
        taller = tensor.new_full((tensor.shape[1], 512), -1).transpose(0, 1)
    else:
        taller = torch.full((512, *tensor.shape[1:]), -1.0).to(tensor.dtype)
    taller[:384].copy_(tensor)
    return taller


# Weights and sums.


def partials_with(run: CleanRun, rank: int, weigh: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The rank's partials, real rows computed anew from expert outputs and fp32 weights."""
    partial = run.tensor(Stage.POST_PERMUTE, rank, "partial").clone()
    output = run.tensor(Stage.GEMM2, rank, "output")
    weights, start = run.tensor(Stage.DISPATCH, rank, "topk_weights"), 0
    for slot, end in enumerate(run.tensor(Stage.DISPATCH, rank, "psum").tolist()):
        rows = output[slot, : end - start] if output.dim() == 3 else output[start:end]
        partial[start:end] = weigh(rows.float(), weights[start:end, None]).bfloat16()
        start = -(-end // 128) * 128
    return partial


def exact(rows: Tensor, weights: Tensor) -> Tensor:
    return rows * weights


def rounded(rows: Tensor, weights: Tensor) -> Tensor:
    return rows * weights.bfloat16().float()


@pytest.mark.parametrize(("form", "right"), [("slabs", exact), ("in place", rounded)])
def test_weights_are_rounded_in_front_of_the_product_in_one_form_alone(clean_form, form, right):
    run, wrong = clean_form(form), {exact: rounded, rounded: exact}[right]
    same = {"partial": partials_with(run, 2, right)}
    assert found(run, Stage.POST_PERMUTE, 2, same, "band") == []
    other = {"partial": partials_with(run, 2, wrong)}
    first = found(run, Stage.POST_PERMUTE, 2, other, "band")[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.POST_PERMUTE, 2, "partial")
    assert None not in (first.token, first.slot, first.expert)


@pytest.mark.parametrize("form", EXPANDED)
def test_weighted_routes_that_are_not_stored_are_found(clean_form, form):
    run = clean_form(form)
    wide = run.tensor(Stage.POST_PERMUTE, 2, "partial").float()
    first = found(run, Stage.POST_PERMUTE, 2, {"partial": wide}, "contract")[0]
    assert (first.stage, first.tensor) == (Stage.POST_PERMUTE, "partial")


@pytest.mark.parametrize("form", EXPANDED)
def test_a_route_that_combine_left_out_is_found(clean_form, form):
    """Off by one route, however small, where a band of roundings is allowed."""
    run = clean_form(form)
    row, _ = first_real_row(run, 2)
    source, token_row = (
        int(run.tensor(Stage.DISPATCH, 2, f"handle.source_{part}")[row]) for part in ("rank", "row")
    )
    routed = run.tensor(Stage.COMBINE, source, "routed").clone()
    routed[token_row] -= run.tensor(Stage.POST_PERMUTE, 2, "partial")[row]
    first = found(run, Stage.COMBINE, source, {"routed": routed}, "band")[0]
    assert (first.stage, first.rank) == (Stage.COMBINE, source)
    assert first.token == run.layer_token(source, token_row)


@pytest.mark.parametrize("form", EXPANDED)
def test_padding_that_names_no_expert_or_a_count_too_many_is_found(clean_form, form):
    run = clean_form(form)
    name = "rows.masked_m" if form == "slabs" else "rows.m_indices"
    changed = run.tensor(Stage.PRE_PERMUTE, 2, name).clone()
    changed[0 if form == "slabs" else 127] += 1 if form == "slabs" else -1
    first = found(run, Stage.PRE_PERMUTE, 2, {name: changed}, "contract")[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.PRE_PERMUTE, 2, name)
