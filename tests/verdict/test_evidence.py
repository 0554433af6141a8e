"""What is kept of a comparison that failed: all of it, or few rows where that is too much."""

from dataclasses import replace

import pytest
import torch

from actors.driver import run_scenario
from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import quantize_groups
from reports.verdict import evidence, weights
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from scenarios.loader import load_scenario
from tests.verdict.clean_runs import SMOKE
from tests.verdict.diagnoses import diagnosed, named
from tests.verdict.test_diagnosis_rows import RANK, of_received

WIDTH = 4
ERRORS = [0.5, 2.0, 9.0, 3.0, 0.1, 0.2, 0.3] + [4.0] * 20
"""Of the rows of rank 0; those of rank 1 are right."""


def entered(room: int, times: int = 1) -> Ledger:
    """A ledger after comparisons of rows with these errors, band 1."""
    ledger = Ledger(room=room)
    errors = torch.tensor([*ERRORS, 0.0, 0.0], dtype=torch.float64)[:, None].repeat(1, WIDTH)
    rank = torch.tensor([0] * len(ERRORS) + [1, 1])
    rows = replace(Rows.of_rank(0, len(rank)), rank=rank, token=torch.arange(len(rank)))
    zero, one = torch.zeros_like(errors), torch.ones_like(errors)
    for number in range(times):
        ledger.cells("band", Stage.GEMM1, f"t{number}", rows, got=errors, want=zero, band=one)
    return ledger


def kept(room: int):
    (both_sides,) = entered(room).evidence.values()
    return both_sides


def test_a_comparison_that_takes_half_the_room_is_kept_whole():
    cells = (len(ERRORS) + 2) * WIDTH
    assert len(kept(2 * cells).rows) == len(ERRORS) + 2
    assert len(kept(2 * cells - 1).rows) < len(ERRORS) + 2


def test_of_a_larger_one_the_worst_the_first_wrong_and_some_right_rows_are_kept():
    both_sides = kept(2 * 10 * WIDTH)
    assert both_sides.rows.token.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert both_sides.wrong.any(1).tolist() == [False, True, True, True, False] + [True] * 5
    assert both_sides.got[:, 0].tolist() == [0.5, 2.0, 9.0, 3.0, 0.1] + [4.0] * 5


def test_rows_keep_the_place_that_they_had_among_all_and_ranks_their_number():
    both_sides = kept(2 * 10 * WIDTH)
    assert both_sides.place.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert both_sides.compared == {0: len(ERRORS), 1: 2}


def test_coordinates_of_all_wrong_rows_are_kept():
    assert kept(1).wrong_rows.token.tolist() == [1, 2, 3, *range(7, 27)]


def test_a_full_ledger_still_keeps_the_worst_row():
    assert kept(0).got.tolist() == [[9.0] * WIDTH]


def test_many_comparisons_take_no_more_than_the_room_and_a_row_each():
    room = 3 * len(ERRORS) * WIDTH
    ledger = entered(room, times=40)
    assert sum(both_sides.size for both_sides in ledger.evidence.values()) <= room + 40 * WIDTH


def test_a_ledger_that_is_copied_has_as_much_room_left():
    ledger = entered(10_000)
    assert ledger.copy().room == ledger.room < 10_000


def test_few_rows_are_enough_to_name_exchanged_ones(clean_ue8m0, monkeypatch):
    monkeypatch.setattr(evidence, "ROOM", 1 << 13)
    found = of_received(clean_ue8m0, [1, 0])
    assert named(found) == ("rows_misplaced", "high")


def test_few_rows_of_noise_are_nobodys(clean_ue8m0, monkeypatch):
    monkeypatch.setattr(evidence, "ROOM", 1 << 13)
    codes = clean_ue8m0.tensor(Stage.DISPATCH, RANK, "hidden_states")
    noise = torch.randn(codes.shape, generator=torch.Generator().manual_seed(3))
    values = quantize_groups(noise.to(torch.bfloat16), ScaleFormat.UE8M0).values
    found = diagnosed(clean_ue8m0, Stage.DISPATCH, RANK, {"hidden_states": values})
    assert named(found) == (None, "none")


def test_wrong_matrices_are_read_alike_whether_or_not_they_are_kept(clean_ue8m0, monkeypatch):
    """The rank shows other weights than it multiplied with: GEMM2 is held against these."""
    held = clean_ue8m0.traces[RANK][Stage.WEIGHTS]["experts.w2.values"]
    swapped = held.view(torch.uint8).flip(0).view(held.dtype)
    traces = clean_ue8m0.changed(Stage.WEIGHTS, RANK, {"experts.w2.values": swapped})
    found = []
    for cached in (1 << 30, 0):
        monkeypatch.setattr(weights, "CACHED_BYTES", cached)
        ledger = clean_ue8m0.judged(traces, judge=Judge(clean_ue8m0.resolved.judged))
        found.append(ledger.deviations)
    assert found[0] == found[1]
    assert {one.stage for one in found[0]} >= {Stage.WEIGHTS, Stage.GEMM2}


@pytest.mark.parametrize(
    ("fault", "mistake"),
    [
        ("experts_strided", "wrong_expert"),
        ("gate_up_swapped", "gate_up_swapped"),
        ("gate_up_interleave_mismatch", "gate_up_swapped"),
        ("requant_without_pow2", "scale_exponent"),
    ],
)
def test_a_matrix_of_which_few_rows_are_kept_is_named_by_all_of_its_rows(
    fault, mistake, monkeypatch
):
    monkeypatch.setattr(evidence, "ROOM", 1 << 10)
    changes = ["run.runtime=loopback", f"inject=[{fault}]", "inputs.modes=[random]"]
    result = run_scenario(load_scenario(SMOKE, overrides=changes), asks=False).result
    first = result.findings[0]
    assert (first.stage, first.mistake, first.confidence) == (Stage.WEIGHTS, mistake, "high")
