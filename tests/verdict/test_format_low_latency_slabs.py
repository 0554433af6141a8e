"""The contract of low-latency slabs: counts, chunks, sources, height, and what lies past them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from tests.verdict.clean_runs import CleanRun
from tests.verdict.low_latency_runs import (
    RANK,
    SETTINGS,
    SLAB_ROWS,
    SlabRow,
    copy_of,
    found,
    low_latency_run,
    slab_rows,
    token_of,
)

SLABS = (Stage.DISPATCH, Stage.PRE_PERMUTE, Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2)


@pytest.fixture(params=SETTINGS)
def name(request) -> str:
    return request.param


@pytest.fixture
def run(name) -> CleanRun:
    return low_latency_run(name)


@pytest.mark.parametrize("off", [1, -1])
@pytest.mark.parametrize(
    ("stage", "tensor"), [(Stage.DISPATCH, "masked_m"), (Stage.PRE_PERMUTE, "rows.masked_m")]
)
def test_a_slabs_count_that_is_not_its_rows_is_located(run, stage, tensor, off):
    counts = run.tensor(stage, RANK, tensor).clone()
    rows = int(counts[1])
    counts[1] += off
    here = found(run, stage, **{tensor.replace(".", "__"): counts})
    assert (here[0].stage, here[0].rank) == (stage, RANK)
    one = next(one for one in here if one.tensor == tensor)
    assert (one.check, one.expert, one.got, one.want) == ("contract", 7, rows + off, rows)


@pytest.mark.parametrize("off", [1, -1])
def test_a_chunk_that_is_not_its_sources_routes_is_located(run, off):
    count = run.tensor(Stage.DISPATCH, RANK, "handle.count").clone()
    rows = int(count[0, 2])
    count[0, 2] += off
    here = found(run, Stage.DISPATCH, handle__count=count)
    assert {one.rank for one in here if one.stage is Stage.DISPATCH} == {RANK}
    one = next(one for one in here if one.tensor == "handle.count")
    assert (one.expert, one.got, one.want) == (6, rows + off, rows)
    assert one.detail == f"{rows + off} rows from rank 2 for {rows} routes"


def test_rows_of_one_source_counted_for_another_are_found(run):
    """The slab's sum stays as it is."""
    count = run.tensor(Stage.DISPATCH, RANK, "handle.count").clone()
    count[0, 2] -= 1
    count[0, 0] += 1
    sources = [one.detail for one in found(run, Stage.DISPATCH, handle__count=count)]
    assert [f"from rank {rank} for" in " ".join(sources) for rank in range(4)] == [
        *(True, False, True, False)
    ]


@pytest.mark.parametrize("off", [1, -1], ids=["gap", "overlap"])
def test_chunks_that_do_not_lie_end_to_end_are_found(run, off):
    begin = run.tensor(Stage.DISPATCH, RANK, "handle.begin").clone()
    behind = max((row for row in slab_rows(run) if row.slot == 0), key=lambda row: row.row)
    begin[0, behind.source] += off
    here = found(run, Stage.DISPATCH, handle__begin=begin)
    (one,) = [one for one in here if one.tensor == "handle.begin"]
    assert (one.check, one.stage, one.rank) == ("contract", Stage.DISPATCH, RANK)


def with_source_row(run: CleanRun, row: SlabRow, value: int) -> Tensor:
    source_row = run.tensor(Stage.DISPATCH, RANK, "handle.source_row").clone()
    source_row[row.slot, row.row] = value
    return source_row


@pytest.mark.parametrize("value", [7, -1, 2**31 - 1], ids=["one more", "negative", "poison"])
def test_a_row_that_its_source_does_not_have_is_found(run, value):
    row = next(row for row in slab_rows(run) if row.source == 2)
    here = found(run, Stage.DISPATCH, handle__source_row=with_source_row(run, row, value))
    assert {one.rank for one in here if one.stage is Stage.DISPATCH} == {RANK}
    (one,) = [one for one in here if (one.check, one.tensor) == ("contract", "handle.source_row")]
    assert f"comes from row {value} of rank 2, which does not exist" in one.detail


def test_a_row_that_arrives_twice_is_named(run):
    chunk = [row for row in slab_rows(run) if (row.slot, row.source) == (0, 2)]
    one, other = chunk[:2]
    source_row = with_source_row(run, other, one.source_row)
    first = next(
        deviation
        for deviation in found(run, Stage.DISPATCH, handle__source_row=source_row)
        if deviation.check == "accounts" and deviation.tensor == "handle.source_row"
    )
    assert (first.stage, first.rank, first.rows, first.expert) == (Stage.DISPATCH, RANK, 2, 6)
    wrong = {token_of(run, one): 2.0, token_of(run, other): 0.0}
    assert first.got == wrong[first.token]


def test_two_rows_that_claim_each_others_source_are_found(run):
    one, other = [row for row in slab_rows(run) if (row.slot, row.source) == (0, 2)][:2]
    swapped = with_source_row(run, one, other.source_row)
    swapped[other.slot, other.row] = one.source_row
    here = found(run, Stage.DISPATCH, handle__source_row=swapped)
    dispatch = [deviation for deviation in here if deviation.stage is Stage.DISPATCH]
    assert {(one.rank, one.tensor.removesuffix("_scale")) for one in dispatch} == {
        (RANK, "hidden_states")
    }
    assert dispatch[0].token in {token_of(run, one), token_of(run, other)}


def test_what_lies_past_the_counts_is_nobodys_business(run):
    traces = list(run.traces)
    for stage in (Stage.DISPATCH, Stage.PRE_PERMUTE, Stage.POST_PERMUTE):
        past = torch.arange(SLAB_ROWS) >= run.tensor(Stage.DISPATCH, RANK, "masked_m")[:, None]
        changed = {}
        for tensor, value in run.traces[RANK][stage].items():
            if value.shape[:2] == (2, SLAB_ROWS):
                changed[tensor] = copy_of(value)
                bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
                changed[tensor].view(bits)[past] = 1
        traces[RANK] = replace(
            traces[RANK],
            stages={**traces[RANK].stages, stage: {**run.traces[RANK][stage], **changed}},
        )
    assert run.judged(traces).deviations == []


def taller(tensor: Tensor) -> Tensor:
    """Slabs twice as high, with the same axis fastest; anything else as it is."""
    if tensor.dim() < 2 or tensor.shape[:2] != (2, SLAB_ROWS):
        return tensor
    shape = [2, 2 * SLAB_ROWS, *tensor.shape[2:]]
    if tensor.dim() == 3 and tensor.stride(1) == 1:
        higher = tensor.new_zeros(2, shape[2], shape[1]).transpose(1, 2)
    else:
        higher = torch.zeros(shape, dtype=tensor.dtype)
    higher[:, :SLAB_ROWS].copy_(tensor)
    return higher


def test_slabs_of_another_height_are_found(run):
    stages = dict(run.traces[RANK].stages)
    for stage in (*SLABS, Stage.POST_PERMUTE):
        stages[stage] = {name: taller(tensor) for name, tensor in stages[stage].items()}
    traces = [*run.traces[:RANK], replace(run.traces[RANK], stages=stages)]
    (one,) = run.judged(traces).deviations
    assert (one.stage, one.rank) == (Stage.DISPATCH, RANK)
    assert one.detail == "slabs of 64 rows, 32 are due"


@pytest.mark.parametrize("name", ["ue8m0", "fp32"], indirect=True)
def test_scales_that_do_not_lie_along_the_rows_are_found(run):
    scale = run.tensor(Stage.DISPATCH, RANK, "hidden_states_scale")
    flat = torch.zeros((2, SLAB_ROWS, 4), dtype=scale.dtype)[:, :, : scale.shape[2]].copy_(scale)
    here = found(run, Stage.DISPATCH, hidden_states_scale=flat)
    assert {(one.stage, one.rank) for one in here} == {(Stage.DISPATCH, RANK)}
    assert any(one.tensor == "hidden_states_scale" for one in here)
