"""Entering comparisons: ratios, the worst of each rank, where it is, what is blinded."""

import math

import pytest
import torch

from moe.formats import Stage
from reports.verdict.deviation import Deviation
from reports.verdict.ledger import MOVES, Ledger, bitwise_equal, error_over_band
from reports.verdict.rows import Rows

INF, NAN = math.inf, math.nan


def f64(*values):
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "want", "band", "ratio"),
    [
        (1.5, 1.0, 1.0, 0.5),
        (0.0, 1.0, 0.5, 2.0),
        (1.0, 1.0, 0.0, 0.0),
        (1.0, 1.0 + 2**-50, 0.0, INF),
        (0.0, -0.0, 0.0, 0.0),
        (NAN, NAN, 1.0, 0.0),
        (NAN, 1.0, 1.0, INF),
        (1.0, NAN, 1.0, INF),
        (INF, INF, 0.0, 0.0),
        (INF, -INF, 1.0, INF),
        (INF, NAN, NAN, 0.0),
        (NAN, -INF, NAN, 0.0),
        (INF, 1.0, 1.0, INF),
        (1.0, INF, INF, INF),
        (2.0, 1.0, NAN, INF),
    ],
)
def test_error_over_band(got, want, band, ratio):
    assert error_over_band(f64(got), f64(want), f64(band)).item() == ratio


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (torch.tensor([[0.0]]), torch.tensor([[-0.0]]), False),
        (torch.tensor([[NAN]]), torch.tensor([[NAN]]), True),
        (torch.tensor([[1.0]]), torch.tensor([[1.0]], dtype=torch.float64), False),
        (torch.tensor([[3]]), torch.tensor([[3]]), True),
        (torch.tensor([[3]], dtype=torch.int32), torch.tensor([[3]]), False),
        (torch.tensor([[1.0]]).bfloat16(), torch.tensor([[1.0]]).bfloat16(), True),
        (
            torch.tensor([[0.5]]).to(torch.float8_e4m3fn),
            torch.tensor([[0.5625]]).to(torch.float8_e4m3fn),
            False,
        ),
    ],
    ids=["signed zero", "nan", "f32 f64", "int64", "int32 int64", "bf16", "e4m3"],
)
def test_bitwise_equal(got, want, equal):
    assert bitwise_equal(got, want).tolist() == [[equal]]


def test_tensors_of_another_shape_are_unequal_everywhere():
    assert not bitwise_equal(torch.zeros(2, 3), torch.zeros(2, 2)).any()


def entered(errors, ranks, **coordinates):
    """A ledger after ``cells`` of [N, C] errors against zero, with band 1."""
    errors = torch.tensor(errors, dtype=torch.float64)
    ledger, none = Ledger(), torch.full((len(ranks),), -1)
    rows = Rows(
        rank=torch.tensor(ranks),
        token=coordinates.get("token", none),
        slot=coordinates.get("slot", none),
        expert=coordinates.get("expert", none),
    )
    want, band = torch.zeros_like(errors), torch.ones_like(errors)
    ledger.cells("band", Stage.GEMM1, "gate_up", rows, got=errors, want=want, band=band)
    return ledger


def test_the_worst_is_kept_for_each_rank():
    ledger = entered([[0.2, -0.5], [0.9, 0.0], [0.1, 0.3]], ranks=[0, 0, 2])
    assert ledger.worst == {(Stage.GEMM1, 0): 0.9, (Stage.GEMM1, 2): 0.3}


def test_half_a_band_is_no_deviation():
    assert entered([[0.5, -0.5]], ranks=[0]).deviations == []


def test_a_whole_band_is_no_deviation():
    assert entered([[1.0]], ranks=[0]).deviations == []


def test_each_rank_gets_one_deviation_at_its_worst_row():
    tokens = torch.tensor([10, 11, 12, 13])
    ledger = entered([[2.0], [3.0], [0.5], [7.0]], ranks=[0, 0, 1, 2], token=tokens)
    found = [(one.rank, one.token, one.ratio, one.rows) for one in ledger.deviations]
    assert found == [(0, 11, 3.0, 2), (2, 13, 7.0, 1)]


def test_coordinates_that_do_not_apply_are_left_out():
    (deviation,) = entered([[2.0]], ranks=[0], slot=torch.tensor([4])).deviations
    assert (deviation.token, deviation.slot, deviation.expert) == (None, 4, None)


@pytest.mark.parametrize(
    ("column", "block"), [(0, (0, 128)), (127, (0, 128)), (128, (128, 256)), (299, (256, 300))]
)
def test_columns_are_the_128_around_the_worst_cell_cut_at_the_edge(column, block):
    errors = torch.zeros(1, 300)
    errors[0, column] = 2
    (deviation,) = entered(errors.tolist(), ranks=[0]).deviations
    assert deviation.columns == block


def test_both_values_and_the_band_are_those_of_the_worst_cell():
    (deviation,) = entered([[0.5, -4.0, 2.0]], ranks=[3]).deviations
    assert (deviation.got, deviation.want, deviation.band) == (-4.0, 0.0, 1.0)


def test_a_stage_without_rows_is_not_asked():
    ledger = Ledger()
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    rows = Rows.of_rank(0, 0)
    ledger.cells("band", Stage.GEMM1, "t", rows, got=nothing, want=nothing, band=nothing)
    assert (ledger.asked, ledger.worst) == (set(), {})


def test_moved_data_has_to_keep_the_sign_of_zero():
    ledger = Ledger()
    got, want = torch.tensor([[0.0, 1.0]]), torch.tensor([[-0.0, 1.0]])
    ledger.moved(Stage.DISPATCH, "t", Rows.of_rank(0, 1), got=got, want=want)
    assert [(one.check, one.columns) for one in ledger.deviations] == [(MOVES, (0, 2))]


def test_a_blinded_check_reports_neither_cells_nor_rules():
    ledger = Ledger(blinded=frozenset({"band"}))
    far = f64(9.0)
    rows = Rows.of_rank(0, 1)
    ledger.cells("band", Stage.TAIL, "t", rows, got=far, want=0 * far, band=far)
    ledger.steps("band", Stage.TAIL, "t", rows, got=far, want=0 * far, legal=far == 0)
    ledger.report(Deviation(check="band", stage=Stage.TAIL, rank=0, tensor="t", detail=""))
    assert (ledger.deviations, ledger.worst) == ([], {})


def test_blinding_one_check_leaves_the_others_seeing():
    ledger = Ledger(blinded=frozenset({"band"}))
    ledger.report(Deviation(check="contract", stage=Stage.TAIL, rank=0, tensor="t", detail=""))
    assert len(ledger.deviations) == 1


def test_blame_goes_by_stage_then_named_token_then_size_then_rank():
    def one(stage, rank, ratio, token=None):
        return Deviation(
            check="band", stage=stage, rank=rank, tensor="t", detail="", ratio=ratio, token=token
        )

    ordered = [
        one(Stage.WEIGHTS, 3, 2.0),
        one(Stage.GEMM1, 1, 5.0, token=4),
        one(Stage.GEMM1, 0, 3.0, token=9),
        one(Stage.GEMM1, 2, 3.0, token=1),
        one(Stage.GEMM1, 0, INF),
        one(Stage.TAIL, 0, INF, token=0),
    ]
    ledger = Ledger(deviations=[ordered[i] for i in (4, 2, 5, 0, 3, 1)])
    ledger.sort()
    assert ledger.deviations == ordered


def test_a_copy_does_not_share_what_is_entered_later():
    ledger = Ledger()
    copy = ledger.copy()
    copy.report(Deviation(check="band", stage=Stage.TAIL, rank=0, tensor="t", detail=""))
    copy.ask("band")
    assert (ledger.deviations, ledger.worst, ledger.asked) == ([], {}, set())


@pytest.mark.parametrize("got", [-INF, INF, NAN, 0.0])
def test_what_may_overflow_may_become_anything(got):
    assert error_over_band(f64(got), f64(-1e39), f64(INF)).item() == 0


def test_cells_that_may_overflow_are_counted():
    ledger = Ledger()
    want, band = f64(1.0, 1e39, 2.0), f64(0.1, INF, 0.2)
    ledger.cells("band", Stage.GEMM2, "t", Rows.of_rank(0, 1), got=want, want=want, band=band)
    assert ledger.unbounded == {Stage.GEMM2: 1}
    assert ledger.copy().unbounded == {Stage.GEMM2: 1}


def test_what_is_no_number_is_blamed_before_codes_that_may_come_of_it():
    def deviation(tensor, got, want):
        return Deviation(
            check="band",
            stage=Stage.TAIL,
            rank=0,
            tensor=tensor,
            token=1,
            got=got,
            want=want,
            detail="",
        )

    codes = deviation("shared.hidden_states", 448.0, 3.0)
    due = deviation("shared.output", NAN, NAN)
    value = deviation("shared.activation", NAN, 0.5)
    ordered = sorted([codes, due, value], key=lambda one: one.blame)
    assert [one.tensor for one in ordered] == [value.tensor, codes.tensor, due.tensor]
