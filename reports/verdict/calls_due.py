"""Every collective that a rank owes in one forward, with its bytes: from topology and routes."""

from collections.abc import Sequence
from itertools import zip_longest

from reports.verdict.deviation import Deviation
from reports.verdict.formats.view import DueCall
from reports.verdict.glue_calls import glue_calls_due
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import ACCOUNTS
from reports.verdict.subject import Subject
from topology.mesh import Group

EQUAL_SIZES = ("all_reduce", "reduce_scatter_v")
"""Verbs to which every member hands the same rows' sums."""


def calls_due(subject: Subject, rank: int) -> Sequence[DueCall]:
    """Of the glue and of the dispatch format, in the order of the stages."""
    due = [*glue_calls_due(subject.layer, rank), *subject.view.calls_due(subject, rank)]
    return sorted(due, key=lambda call: call.stage.position)


def check_group_calls(due: Sequence[Sequence[DueCall]], ledger: Ledger) -> None:
    """Members of a group owe it the same calls, in the same order and with sizes that fit.

    Each rank's own calls are held against what it owes; so they, too, fit those of its group.

    Args:
        due: each rank's calls.
        ledger: takes the finding: the plan is wrong, whatever the ranks do.
    """
    for group in dict.fromkeys(call.group for calls in due for call in calls):
        by_member = [[call for call in due[rank] if call.group == group] for rank in group]
        for rank, calls in zip(group[1:], by_member[1:], strict=True):
            _compare(group, rank, by_member[0], calls, ledger)


def _compare(
    group: Group, rank: int, first: Sequence[DueCall], calls: Sequence[DueCall], ledger: Ledger
) -> None:
    for place, (theirs, ours) in enumerate(zip_longest(first, calls)):
        if theirs is None or ours is None or not _fit(theirs, ours):
            stage = (ours or theirs or first[0]).stage
            ledger.report(
                Deviation(
                    check=ACCOUNTS,
                    stage=stage,
                    rank=rank,
                    tensor="collectives",
                    detail=f"call {place} of group {list(group)} is {_named(ours)} by the plan of "
                    f"rank {rank}, {_named(theirs)} by that of rank {group[0]}",
                )
            )
            return


def _fit(one: DueCall, other: DueCall) -> bool:
    if (one.stage, one.op) != (other.stage, other.op):
        return False
    return one.op not in EQUAL_SIZES or one.payload_bytes == other.payload_bytes


def _named(call: DueCall | None) -> str:
    return "none" if call is None else f"{call.stage}/{call.op} of {call.payload_bytes} bytes"
