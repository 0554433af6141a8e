"""An end-to-end difference is laid to an own error on its way, and to no other finding."""

import pytest

from moe.formats import Stage
from reports.verdict.compared import BAND
from reports.verdict.deviation import Deviation
from reports.verdict.stage_checks import ACCOUNTS, CONTRACT
from reports.verdict.stage_weights import PREPARATION
from tests.verdict.exact_runs import compared, exact_run

RANK = 3


def known(check, stage, rank, **where):
    return Deviation(check=check, stage=stage, rank=rank, tensor="any", detail="before", **where)


def negated(stage, name):
    run = exact_run("ue8m0")
    return run.changed(stage, RANK, {name: -run.tensor(stage, RANK, name)})


def route(index=0):
    """(token, expert) of a route that rank 3 computes."""
    found = exact_run("ue8m0").route(RANK, index)
    return found.token, found.expert


TOKEN, EXPERT = route()
ELSEWHERE = next(expert for expert in range(8) if expert // 2 != RANK)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(known(ACCOUNTS, Stage.GLUE_IN, 0), id="a count elsewhere"),
        pytest.param(known(ACCOUNTS, Stage.GLUE_IN, RANK), id="a count on this rank"),
        pytest.param(known(CONTRACT, Stage.DISPATCH, RANK, token=TOKEN), id="a broken contract"),
        pytest.param(known(PREPARATION, Stage.WEIGHTS, 0, expert=ELSEWHERE), id="other weights"),
        pytest.param(known(BAND, Stage.ROUTE, 0), id="another rank"),
        pytest.param(known(BAND, Stage.COMBINE, RANK, token=TOKEN), id="a later stage"),
    ],
)
def test_a_difference_keeps_its_place_beside(before):
    (one,) = compared("ue8m0", negated(Stage.GEMM1, "gate_up"), [before])
    assert (one.stage, one.rank) == (Stage.GEMM1, RANK)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(known(BAND, Stage.GLUE_IN, 0, token=TOKEN), id="its token on any rank"),
        pytest.param(known(PREPARATION, Stage.WEIGHTS, RANK, expert=EXPERT), id="its weights"),
        pytest.param(known(BAND, Stage.ROUTE, RANK), id="its rank, of which no more is known"),
    ],
)
def test_a_difference_is_inherited_from(before):
    (one,) = compared("ue8m0", negated(Stage.GEMM1, "gate_up"), [before])
    assert (one.stage, one.rank) == (before.stage, before.rank)
    assert one.detail.startswith("inherited: certified cells of gate_up differ in stage gemm1")


def test_behind_combine_the_experts_of_a_token_are_on_its_way():
    before = known(PREPARATION, Stage.WEIGHTS, RANK, expert=EXPERT)
    run = exact_run("ue8m0")
    owner = next(rank for rank in range(4) if TOKEN in run.resolved.judged.sync.entry[rank])
    output = run.tensor(Stage.GLUE_OUT, owner, "hidden_states")
    traces = run.changed(Stage.GLUE_OUT, owner, {"hidden_states": -output})
    (one,) = compared("ue8m0", traces, [before])
    assert (one.stage, one.rank) == (Stage.WEIGHTS, RANK)
