"""Every layout of the glue and the standard format: silent when clean, exact when spoiled."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from moe.formats import Stage
from reports.verdict.ledger import Ledger
from reports.verdict.stage_weights import JudgedWeights
from tests.verdict.clean_runs import CleanRun, run_clean
from tests.verdict.layouts import LAYOUTS, UNJUDGED
from tests.verdict.spoiling import rank_that_matters, spoiled


@pytest.fixture(scope="session")
def clean_layout() -> Callable[[str], CleanRun]:
    """The clean run of a layout by name, made once."""
    return cache(lambda name: run_clean(*LAYOUTS[name].settings))


EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
SEEN_AS = {
    "restore.output_index": ("rows", "rows.hidden_states", "hidden_states"),
    "handle.source_rank": ("hidden_states",),
    "handle.source_row": ("hidden_states",),
}
"""A wrong way back shows in the rows that it leads to."""

EVERY_TENSOR = [
    pytest.param(name, stage, tensor, id=f"{name}-{stage}-{tensor}")
    for name, layout in LAYOUTS.items()
    for stage, tensor in layout.traced()
]


@EVERY_LAYOUT
def test_a_clean_run_has_no_deviation(clean_layout, layout):
    assert clean_layout(layout).judged().deviations == []


@EVERY_LAYOUT
def test_every_stage_of_every_rank_with_rows_is_compared(clean_layout, layout):
    run = clean_layout(layout)
    entered = set(run.judged().worst)
    sync = run.resolved.judged.sync
    for rank in range(len(run.traces)):
        stages = set(Stage) if sync.layer[rank] else {Stage.WEIGHTS}
        stages -= set() if sync.entry[rank] else {Stage.GLUE_OUT}
        assert {(stage, rank) for stage in stages} <= entered


@EVERY_LAYOUT
def test_no_traced_tensor_is_left_out_of_the_list(clean_layout, layout):
    traced = {
        (stage, name)
        for trace in clean_layout(layout).traces
        for stage, tensors in trace.stages.items()
        for name in tensors
    }
    assert traced - UNJUDGED == set(LAYOUTS[layout].traced())


def names_of(tensor):
    """What a finding may call a tensor: itself, the matrix or rows it is part of, its effect."""
    part = tensor.removeprefix("rows.").removesuffix(".values").removesuffix(".scale")
    return {tensor, part, *SEEN_AS.get(tensor, ())}


def deviations_of(run, traces, stage):
    """What a judge finds; of weights, which it compares once and first, that comparison alone."""
    if stage is not Stage.WEIGHTS:
        return run.judged(traces).deviations
    ledger = Ledger()
    JudgedWeights(run.resolved.judged, traces, ledger)
    return ledger.deviations


@pytest.mark.parametrize(("layout", "stage", "name"), EVERY_TENSOR)
def test_a_spoiled_tensor_is_objected_to_at_its_own_stage_and_rank(
    clean_layout, layout, stage, name
):
    run = clean_layout(layout)
    rank = rank_that_matters(run, stage, name)
    traces = run.changed(stage, rank, {name: spoiled(run, stage, rank, name)})
    deviations = deviations_of(run, traces, stage)
    assert deviations, "nobody objects"
    assert deviations[0].stage is stage
    named = [one for one in deviations if one.stage is stage and one.tensor in names_of(name)]
    assert {one.rank for one in named} == {rank}


@pytest.mark.parametrize(
    "layout", ["dp_tp_all_reduce", "cp_gather", "masked_max_len", "hash_layer"]
)
def test_what_padding_rows_held_before_the_gather_is_nobodys_business(clean_layout, layout):
    run = clean_layout(layout)
    traces, rows = list(run.traces), 0
    for rank, tokens in enumerate(run.resolved.judged.sync.entry):
        is_padding = torch.tensor(tokens) < 0
        rows += int(is_padding.sum())
        own = run.tensor(Stage.GLUE_IN, rank, "own").clone()
        own[is_padding] = 3.0
        traces[rank] = run.changed(Stage.GLUE_IN, rank, {"own": own})[rank]
    assert rows
    assert run.judged(traces).deviations == []
