"""Random corruption is no mistake of a kind: nothing is sure of having recognised it as one."""

import math

import pytest
import torch

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis import Certainty
from reports.verdict.diagnosis.luck import SAMPLE, bits_of_cells
from reports.verdict.judge import Judge
from tests.verdict.layouts import LAYOUTS
from tests.verdict.spoiling import rank_that_matters, row_that_matters

GATHERED, SENT = "dp_gather_fp8", "tp_ep_all_to_all"
DRAWS = [(layout, seed) for layout, groups in ((GATHERED, 3), (SENT, 2)) for seed in range(groups)]
DRAWS_A_GROUP, OF_WEIGHTS = 40, 12
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

WHAT_WAS_DONE = {
    "rows.m_indices": {Mistake.WRONG_EXPERT, Mistake.COUNTS},
    "restore.output_index": {Mistake.WRONG_EXPERT, Mistake.ROWS_MISPLACED},
    "num_recv_tokens_per_expert": {Mistake.COUNTS},
    "topk_ids": {Mistake.EXPERT_CHOICE, Mistake.WRONG_EXPERT, Mistake.COUNTS},
    "expert_ids": {Mistake.WRONG_EXPERT},
}
"""A row whose index is another's is misplaced, one whose expert is another meets it, and so on."""


def traced(layout, *, weights):
    """Every judged tensor of a layout but those that say where messages come from."""
    places = [place for place in LAYOUTS[layout].traced() if "handle." not in place[1]]
    return [place for place in places if (place[0] is Stage.WEIGHTS) == weights]


def drawn(generator, count):
    return int(torch.randint(0, count, (), generator=generator))


def corrupted(run, places, generator):
    """(name, traces): one random cell, scale or row of a random tensor, a bit of each flipped."""
    stage, name = places[drawn(generator, len(places))]
    rank = rank_that_matters(run, stage, name)
    tensor = run.tensor(stage, rank, name)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    row = row_that_matters(run, stage, rank, name)
    rows = copy.flatten(0, -2) if copy.dim() > 2 and copy.is_contiguous() else copy
    cells = rows[row] if copy.dim() > 1 else copy[row : row + 1]
    cells = cells[0] if cells.dim() > 1 else cells
    is_row = drawn(generator, 2) == 1
    for at in range(len(cells)) if is_row else [drawn(generator, len(cells))]:
        if tensor.is_floating_point() or "scale" in name:
            bits = cells.view(BITS[cells.element_size()])
            bits[at] ^= 1 << drawn(generator, 8 * cells.element_size() - 1)
        else:  # an id or an index: another one of the tensor
            cells[at] = tensor.flatten()[drawn(generator, tensor.numel())]
    return name, run.changed(stage, rank, {name: copy})


def sure_of(run, judge, traces):
    """Kinds of mistake that some finding is sure of."""
    found = judge.diagnose(run.batch, traces, run.judged(traces, judge=judge))
    return {one.mistake for one in found.values() if one.certainty is Certainty.HIGH}


@pytest.mark.parametrize(("layout", "seed"), DRAWS)
def test_random_corruption_is_surely_no_mistake_but_what_was_done(clean_layout, layout, seed):
    run, generator = clean_layout(layout), torch.Generator().manual_seed(seed)
    for _ in range(DRAWS_A_GROUP):
        name, traces = corrupted(run, traced(layout, weights=False), generator)
        assert sure_of(run, run.judge, traces) <= WHAT_WAS_DONE.get(name, set()), name


def test_random_corruption_of_weights_is_surely_no_mistake(clean_layout):
    run, generator = clean_layout(GATHERED), torch.Generator().manual_seed(0)
    for _ in range(OF_WEIGHTS):
        name, traces = corrupted(run, traced(GATHERED, weights=True), generator)
        judge = Judge(run.resolved.judged)
        assert sure_of(run, judge, traces) <= WHAT_WAS_DONE.get(name, set()), name


def bits(hit, due, band=0.0):
    due = torch.tensor(due, dtype=torch.float64)
    return bits_of_cells(torch.tensor(hit).double(), due, torch.full_like(due, band))


def test_a_value_that_every_second_due_one_is_proves_a_bit():
    half = [[0.0, 1.0]] * 100
    assert bits([0.0], half) == pytest.approx(1.0, abs=0.02)
    assert bits([0.0, 1.0, 1.0], half) == pytest.approx(3.0, abs=0.06)


def test_a_value_that_is_due_nowhere_proves_as_much_as_the_sample_is_large():
    assert bits([7.0], [[0.0, 1.0]] * 100) == pytest.approx(math.log2(201))
    assert bits([7.0], [[0.0, 1.0]] * 5000) <= math.log2(SAMPLE + 1)


def test_values_within_the_band_are_alike():
    due = [[float(value) for value in range(10)]] * 10
    assert bits([4.5], due) > bits([4.5], due, band=1.0) > bits([4.5], due, band=20.0) == 0


def test_no_number_is_like_no_number_alone():
    assert bits([math.nan], [[0.0, 1.0]] * 100) > 7
    assert bits([math.nan], [[math.nan, math.nan]] * 100) == 0


def test_nothing_hit_proves_nothing():
    assert bits([], [[0.0]]) == 0
