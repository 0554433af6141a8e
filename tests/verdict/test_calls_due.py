"""Members of a group owe it the same calls: known-bad plans are found, those of the layouts not."""

from dataclasses import replace

import pytest

from moe.formats import Stage
from reports.verdict.calls_due import calls_due, check_group_calls
from reports.verdict.formats.view import DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Subject
from tests.verdict.layouts import LAYOUTS

PAIR = (0, 1)


def call(stage, op, payload):
    return DueCall(stage=stage, op=op, group=PAIR, payload_bytes=payload)


GATHER = call(Stage.GLUE_IN, "all_gather_v", 64)
REDUCE = call(Stage.TAIL, "all_reduce", 128)


def found(mine, theirs):
    ledger = Ledger()
    check_group_calls([mine, theirs], ledger)
    return [(one.stage, one.rank) for one in ledger.deviations]


@pytest.mark.parametrize(
    ("theirs", "deviations"),
    [
        ([GATHER, REDUCE], []),
        ([replace(GATHER, payload_bytes=0), REDUCE], []),
        ([GATHER], [(Stage.TAIL, 1)]),
        ([GATHER, REDUCE, REDUCE], [(Stage.TAIL, 1)]),
        ([REDUCE, GATHER], [(Stage.TAIL, 1)]),
        ([GATHER, replace(REDUCE, payload_bytes=64)], [(Stage.TAIL, 1)]),
        ([replace(GATHER, op="all_to_all_v"), REDUCE], [(Stage.GLUE_IN, 1)]),
    ],
    ids=[
        "the same",
        "gathered sizes are each rank's own",
        "one is missing",
        "one too many",
        "another order",
        "sums of other sizes",
        "another verb",
    ],
)
def test_calls_of_a_group(theirs, deviations):
    assert found([GATHER, REDUCE], theirs) == deviations


def test_the_finding_names_both_calls():
    ledger = Ledger()
    check_group_calls([[REDUCE], [replace(REDUCE, payload_bytes=64)]], ledger)
    (one,) = ledger.deviations
    assert "tail/all_reduce of 64 bytes" in one.detail
    assert "tail/all_reduce of 128 bytes" in one.detail


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layouts_groups_agree(clean_layout, layout):
    run = clean_layout(layout)
    subject = Subject(run.resolved.judged, run.view, run.batch, run.traces)
    ledger = Ledger()
    check_group_calls([calls_due(subject, rank) for rank in subject.ranks], ledger)
    assert ledger.deviations == []
