"""A bit that differs when the same tokens come again names its stage, rank and tensor."""

from functools import cache

import pytest
import torch

from actors.driver import run_scenario
from actors.resolve import resolve
from moe.formats import Stage
from moe.trace import RankTrace
from reports.verdict.determinism import BATCH, RERUN, check_batch, check_rerun, last_stage_of_batch
from reports.verdict.format_views import view_of
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Subject
from tests.mutation.worlds import load

WORLDS = ("a2a", "a2a fp32 scales", "slabs", "slabs ll", "v2 expanded", "flashinfer decode")
BY_TOKENS = (Stage.GLUE_IN, Stage.ROUTE, Stage.COMBINE, Stage.TAIL, Stage.GLUE_OUT)
BY_ROUTES = {
    Stage.DISPATCH: "received",
    Stage.PRE_PERMUTE: "row",
    Stage.GEMM1: "row",
    Stage.ACTIVATION: "row",
    Stage.GEMM2: "row",
    Stage.POST_PERMUTE: "received",
}
"""Where a route of the stage lies, in ``RankRoutes``."""

NOT_VALUES = ("m_indices", "masked_m", "live_rows", "restore", "topk", "physical", "handle", "num_")
"""Indices, counts and ways back, behind the route stage."""

RANK = 2
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def forward(world: str):
    """The layer, its tokens and the traces of one forward."""
    loaded = load(world)
    (run,) = run_scenario(loaded, asks=False).runs
    return resolve(loaded).judged, run.batch, [report.trace for report in run.reports]


def subject(world: str, traces) -> Subject:
    layer, batch, _ = forward(world)
    return Subject(layer, view_of(layer), batch, traces)


def is_value(stage: Stage, name: str) -> bool:
    behind = stage in BY_ROUTES
    return not (behind and any(word in name for word in (*NOT_VALUES, "wire", "psum", "pending")))


def spoiled(world: str, stage: Stage, name: str):
    """The traces with one bit of a live row flipped on one rank."""
    traces = forward(world)[2]
    changed = traces[RANK][stage][name].clone(memory_format=torch.preserve_format)
    rows = changed.flatten(0, 1) if changed.dim() == 3 else changed
    row = 0
    if stage in BY_ROUTES:
        row = int(getattr(subject(world, traces).placed[RANK], BY_ROUTES[stage])[0])
    if changed.dim() == 3:
        row = divmod(row, changed.shape[1])
    bits = changed.view(WORD[rows.element_size()])
    at = (*row, 0) if isinstance(row, tuple) else (row, 0)[: bits.dim()]
    bits[at] ^= 1
    stages = {**traces[RANK].stages, stage: {**traces[RANK][stage], name: changed}}
    again = [*traces]
    again[RANK] = RankTrace(rank=RANK, stages=stages)
    return again


CASES = [
    pytest.param(world, stage, name, id=f"{world}-{stage}-{name}")
    for world in WORLDS
    for stage in (*BY_TOKENS, *BY_ROUTES)
    for name in forward(world)[2][RANK][stage]
    if is_value(stage, name)
]


@pytest.mark.parametrize(("world", "stage", "name"), CASES)
def test_a_flipped_bit_is_found_at_its_stage_rank_and_tensor(world, stage, name):
    ledger = Ledger()
    check_rerun(
        subject(world, forward(world)[2]), subject(world, spoiled(world, stage, name)), ledger
    )
    found = {(one.check, one.stage, one.rank, one.tensor) for one in ledger.deviations}
    assert (RERUN, stage, RANK, name) in found


@pytest.mark.parametrize("world", WORLDS)
def test_equal_forwards_have_no_deviation(world):
    ledger, traces = Ledger(), forward(world)[2]
    check_rerun(subject(world, traces), subject(world, traces), ledger)
    assert (ledger.deviations, ledger.asked) == ([], {RERUN})


@pytest.mark.parametrize(("world", "stage", "name"), CASES)
def test_a_flipped_bit_in_another_batch_is_found_at_its_stage_rank_and_tensor(world, stage, name):
    """The list itself stands for the other batch: no row moves, and one has another bit."""
    ledger, order = Ledger(), torch.arange(len(forward(world)[1].hidden_states))
    first = subject(world, forward(world)[2])
    check_batch(first, subject(world, spoiled(world, stage, name)), order, ledger)
    found = {(one.check, one.stage, one.rank, one.tensor) for one in ledger.deviations}
    assert (BATCH, stage, RANK, name) in found


@pytest.mark.parametrize("world", WORLDS)
def test_tokens_are_compared_under_the_number_that_they_have_in_the_list(world):
    """Told that all stand in reverse, the check compares each with another one."""
    ledger, traces = Ledger(), forward(world)[2]
    order = torch.arange(len(forward(world)[1].hidden_states)).flip(0)
    check_batch(subject(world, traces), subject(world, traces), order, ledger)
    assert {one.stage for one in ledger.deviations} == {Stage.GLUE_IN}


@pytest.mark.parametrize(
    ("world", "sets", "last"),
    [
        ("a2a", (), Stage.GLUE_OUT),
        ("a2a", ("moe.redundant_experts=4",), Stage.GEMM2),
        ("slabs ll", ("moe.redundant_experts=4",), Stage.GLUE_OUT),
    ],
)
def test_replicas_end_what_must_not_depend_on_the_batch_where_ranks_sum(world, sets, last):
    layer = resolve(load(world, sets=sets)).judged
    _, batch, traces = forward(world)
    assert last_stage_of_batch(Subject(layer, view_of(layer), batch, traces)) is last


def with_tensors(traces, changes):
    """The traces with tensors of ``RANK`` replaced: {(stage, name): tensor}."""
    stages = dict(traces[RANK].stages)
    for (stage, name), tensor in changes.items():
        stages[stage] = {**stages[stage], name: tensor}
    return [*traces[:RANK], RankTrace(rank=RANK, stages=stages), *traces[RANK + 1 :]]


def losing(world, stage, name):
    """The traces without one route of ``RANK``, which its trace calls for in that tensor."""
    traces = forward(world)[2]
    placed = subject(world, traces).placed[RANK]
    at = (placed.received.diff() == 0).nonzero()[0]  # of two in one received row, the other stays
    tensor = traces[RANK][stage][name].clone()
    tensor[placed.received[at], placed.rows.slot[at]] = -1
    return with_tensors(traces, {(stage, name): tensor}), placed.rows[at]


LOSSES = [
    pytest.param(Stage.DISPATCH, "topk_ids", id="not received"),
    pytest.param(Stage.PRE_PERMUTE, "restore.output_index", id="not placed"),
]


@pytest.mark.parametrize("world", ["a2a", "slabs"])
@pytest.mark.parametrize(("stage", "name"), LOSSES)
def test_a_route_that_is_lost_the_second_time_is_found_where_it_is_lost(world, stage, name):
    traces, ledger = forward(world)[2], Ledger()
    again, lost = losing(world, stage, name)
    check_rerun(subject(world, traces), subject(world, again), ledger)
    (found,) = ledger.deviations
    assert (found.check, found.stage, found.rank, found.tensor) == (RERUN, stage, RANK, "routes")
    assert (found.token, found.slot, found.rows) == (int(lost.token), int(lost.slot), 1)
    assert found.detail == "1 of the earlier forward's are gone, 0 are new"


def test_where_a_route_is_lost_the_bits_of_the_others_are_compared():
    """A bit that differs in front of the lost route is found first."""
    traces, ledger = forward("a2a")[2], Ledger()
    again, _ = losing("a2a", Stage.PRE_PERMUTE, "restore.output_index")
    flipped = spoiled("a2a", Stage.DISPATCH, "hidden_states")[RANK][Stage.DISPATCH]
    again = with_tensors(again, {(Stage.DISPATCH, "hidden_states"): flipped["hidden_states"]})
    check_rerun(subject("a2a", traces), subject("a2a", again), ledger)
    assert {(one.stage, one.tensor) for one in ledger.deviations} == {
        (Stage.DISPATCH, "hidden_states")
    }
