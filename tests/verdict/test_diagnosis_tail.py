"""Branches and partials: named where they are wrong, not where something else looks alike."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.diagnoses import diagnosed, named

RANK = 2


def bf16(values):
    return values.to(torch.bfloat16)


def tail_of(run, routed, shared):
    """[T, H] output of other coefficients than 1 of both branches."""
    combined = run.tensor(Stage.COMBINE, RANK, "routed").double()
    of_shared = run.tensor(Stage.TAIL, RANK, "shared.output").double()
    return bf16(routed * run.resolved.judged.routed_scaling_factor * combined + shared * of_shared)


def of_tail(run, routed, shared):
    return diagnosed(run, Stage.TAIL, RANK, {"output": tail_of(run, routed, shared)})


@pytest.mark.parametrize(
    ("power", "words"),
    [
        (1, "applied twice: the routed sum has coefficient 2.25, due 1.5"),
        (-1, "not applied: the routed sum has coefficient 1, due 1.5"),
        (-2, "applied as its inverse: the routed sum has coefficient 0.667, due 1.5"),
    ],
)
def test_the_scaling_factor_to_another_power_is_named_with_its_coefficient(
    clean_ue8m0, power, words
):
    found = of_tail(clean_ue8m0, 1.5**power, 1.0)
    assert named(found) == ("scaling_factor", "high")
    assert found.words == f"routed_scaling_factor {words}"


@pytest.mark.parametrize("times", [0.0, 2.0, 4.0, 0.5, 0.25])
def test_a_shared_expert_of_another_number_is_named(clean_ue8m0, times):
    found = of_tail(clean_ue8m0, 1.0, times)
    assert named(found) == ("shared_expert", "high")
    assert "missing" in found.words if times == 0 else f"counted {times:g} times" in found.words


@pytest.mark.parametrize(("routed", "shared"), [(1.04, 1.0), (1.0, 0.96), (1.25, 0.75), (3, 1)])
def test_a_gain_that_nothing_has_is_not_explained(clean_ue8m0, routed, shared):
    found = of_tail(clean_ue8m0, routed, shared)
    assert named(found) == (None, "none")
    assert found.words.startswith("unexplained: 9 of 9 rows differ")
    assert "got / due is" in found.words


def partials_of(run, row):
    """[P, H] float64 what each rank gave back for one row of a rank."""
    partials = torch.zeros(len(run.traces), run.resolved.judged.hidden_size, dtype=torch.float64)
    for rank in range(len(run.traces)):
        handle = run.traces[rank][Stage.DISPATCH]
        is_of_row = (handle["handle.source_rank"] == RANK) & (handle["handle.source_row"] == row)
        partials[rank] = run.tensor(Stage.POST_PERMUTE, rank, "partial")[is_of_row].double().sum(0)
    return partials


def of_combine(run, counts, rows=(1,)):
    """Sums of some rows with so much of each rank's partial."""
    routed = run.tensor(Stage.COMBINE, RANK, "routed").clone()
    weights = torch.tensor(counts, dtype=torch.float64)
    for row in rows:
        routed[row] = bf16((weights[:, None] * partials_of(run, row)).sum(0))
    return diagnosed(run, Stage.COMBINE, RANK, {"routed": routed})


@pytest.mark.parametrize(
    ("counts", "mistake", "words"),
    [
        ((1, 0, 1, 1), "partial_missing", "rank 1's partial missing for token 6"),
        ((1, 1, 1, 2), "partial_doubled", "rank 3's partial 2 times for token 6"),
        (
            (2, 1, 0, 1),
            "partial_of_another_rank",
            "rank 2's partial missing and rank 0's partial 2 times for token 6",
        ),
    ],
)
def test_a_partial_that_is_missing_doubled_or_anothers_is_named_with_its_rank(
    clean_ue8m0, counts, mistake, words
):
    found = of_combine(clean_ue8m0, counts)
    assert named(found) == (mistake, "high")
    assert words in found.words


def test_a_sum_that_right_rows_have_is_not_missing_on_the_whole_rank(clean_ue8m0):
    alone = [float(rank == RANK) for rank in range(4)]
    found = of_combine(clean_ue8m0, alone, rows=range(8))
    assert named(found) == ("partial_missing", "high")
    found = of_combine(clean_ue8m0, alone, rows=range(9))
    assert named(found) == ("sum_missing", "high")


def test_the_scaling_factor_twice_in_all_rows_but_one_is_no_law(clean_ue8m0):
    output = tail_of(clean_ue8m0, 1.5, 1.0)
    output[4] = clean_ue8m0.tensor(Stage.TAIL, RANK, "output")[4]
    found = diagnosed(clean_ue8m0, Stage.TAIL, RANK, {"output": output})
    assert named(found) == (None, "none")


def test_a_partial_that_is_four_percent_too_large_is_not_explained(clean_ue8m0):
    assert named(of_combine(clean_ue8m0, (1, 1.04, 1, 1))) == (None, "none")


def test_columns_of_zeros_at_the_end_are_named(clean_ue8m0):
    routed = clean_ue8m0.tensor(Stage.COMBINE, RANK, "routed").clone()
    routed[:, 192:] = 0
    found = diagnosed(clean_ue8m0, Stage.COMBINE, RANK, {"routed": routed})
    assert named(found) == ("tail_columns", "high")
    assert found.words == "columns 192..255 are zero"


def test_columns_of_zeros_in_the_middle_are_not_the_end(clean_ue8m0):
    routed = clean_ue8m0.tensor(Stage.COMBINE, RANK, "routed").clone()
    routed[:, 64:128] = 0
    found = diagnosed(clean_ue8m0, Stage.COMBINE, RANK, {"routed": routed})
    assert named(found) == (None, "none")
    assert "wrong columns 64..127, 64 of 256" in found.words


def test_the_sum_of_the_round_before_is_stale(clean_ue8m0):
    routed = clean_ue8m0.tensor(Stage.COMBINE, RANK, "routed")
    run = clean_ue8m0
    other = bf16(routed.double().flip(1))
    earlier = type(run)(
        resolved=run.resolved,
        batch=run.batch,
        traces=run.changed(Stage.COMBINE, RANK, {"routed": other}),
        calls=run.calls,
    )
    left = routed.clone()
    left[3] = other[3]
    found = diagnosed(run, Stage.COMBINE, RANK, {"routed": left}, earlier=earlier)
    assert named(found) == ("stale", "high")
    assert found.words.startswith("stale: token 8")
    assert named(diagnosed(run, Stage.COMBINE, RANK, {"routed": left})) == (None, "none")
