"""Who is at fault, from how the ranks ended and where they were."""

import pytest

from actors.postmortem import RankEnd, world_failure
from actors.progress import Place, Whereabouts

OK = RankEnd(state="ok")
NOWHERE = Whereabouts()


def at(rank: int, stage: str, op: str = "", entered: int = 0) -> Whereabouts:
    place = Place(stage=stage, op=op, entered=entered)
    return Whereabouts(node="n", pid=100 + rank, place=place)


def lost_a_peer(entered: int) -> RankEnd:
    place = Place(stage="combine", op="all_to_all_v", entered=entered)
    return RankEnd(state="raised", cause="RuntimeError: Connection closed by peer", place=place)


def in_combine(rank: int) -> Whereabouts:
    return at(rank, "combine", "all_to_all_v", entered=3)


DIED = RankEnd(state="died", cause="End of file.")
RAISED = RankEnd(state="raised", cause="ValueError: no\n  File", place=Place(stage="route"))

CASES = {
    "a death beats the peers it took along": (
        {0: lost_a_peer(3), 1: DIED},
        [in_combine(0), at(1, "gemm1"), in_combine(2)],
        ["released", "died", "released"],
        "rank 1 died in stage gemm1 on n (pid 101): End of file.",
    ),
    "a raise outside a collective beats one inside": (
        {0: lost_a_peer(3), 1: RAISED},
        [in_combine(0), at(1, "gemm1")],
        ["released", "raised"],
        "rank 1 raised in stage route on n (pid 101): ValueError: no",
    ),
    "of raises inside collectives the first counts": (
        {1: lost_a_peer(3), 0: lost_a_peer(3)},
        [in_combine(0), in_combine(1)],
        ["released", "raised"],
        "rank 1 raised in all_to_all_v of stage combine on n (pid 101): "
        "RuntimeError: Connection closed by peer",
    ),
    "two deaths are both told": (
        {1: DIED, 0: DIED},
        [at(0, "tail"), at(1, "gemm1")],
        ["died", "died"],
        "rank 0 died in stage tail on n (pid 100): End of file.; "
        "rank 1 died in stage gemm1 on n (pid 101): End of file.",
    ),
    "of silent ranks the one that computes hung": (
        {},
        [in_combine(0), at(1, "gemm1", entered=2), in_combine(2)],
        ["released", "hung", "released"],
        "rank 1 hung in stage gemm1 on n (pid 101): no answer for 9 s; "
        "ranks 0, 2 wait in all_to_all_v of stage combine",
    ),
    "of waiting ranks the one behind hung": (
        {},
        [in_combine(0), at(1, "dispatch", "all_to_all_v", entered=2)],
        ["released", "hung"],
        "rank 1 hung in all_to_all_v of stage dispatch on n (pid 101): no answer for 9 s; "
        "rank 0 waits in all_to_all_v of stage combine",
    ),
    "a rank that returned too early is at fault": (
        {1: OK},
        [in_combine(0), at(1, "glue_out", entered=2), in_combine(2)],
        ["released", "hung", "released"],
        "rank 1 returned on n (pid 101): its forward ended without all_to_all_v of stage combine; "
        "ranks 0, 2 wait in all_to_all_v of stage combine",
    ),
    "all stuck in one collective hung together": (
        {},
        [in_combine(0), in_combine(1)],
        ["hung", "hung"],
        "rank 0 hung in all_to_all_v of stage combine on n (pid 100): no answer for 9 s; "
        "rank 1 hung in all_to_all_v of stage combine on n (pid 101): no answer for 9 s",
    ),
    "a rank that never spoke did not start": (
        {},
        [at(0, "start", "rendezvous", entered=1), NOWHERE],
        ["released", "not_started"],
        "rank 1 did not start: no answer for 9 s; rank 0 waits in rendezvous of stage start",
    ),
    "bystanders that never spoke did not start either": (
        {0: DIED},
        [NOWHERE, NOWHERE],
        ["died", "not_started"],
        "rank 0 died in stage start: End of file.",
    ),
    "a rank that was through stays ok": (
        {0: OK, 1: DIED},
        [at(0, "glue_out", entered=3), at(1, "glue_out", entered=3)],
        ["ok", "died"],
        "rank 1 died in stage glue_out on n (pid 101): End of file.",
    ),
}


@pytest.mark.parametrize(("ends", "seen", "states", "summary"), CASES.values(), ids=CASES.keys())
def test_the_sentence_names_rank_stage_and_cause(ends, seen, states, summary):
    assert world_failure(ends, seen, timeout_s=9.0).summary == summary


@pytest.mark.parametrize(("ends", "seen", "states", "summary"), CASES.values(), ids=CASES.keys())
def test_every_rank_gets_a_state(ends, seen, states, summary):
    error = world_failure(ends, seen, timeout_s=9.0)
    assert [status.state for status in error.ranks] == states


def test_the_whole_cause_stays_with_the_rank():
    error = world_failure({0: RAISED}, [at(0, "route")], timeout_s=9.0)
    assert error.ranks[0].cause == "ValueError: no\n  File"


def test_a_rank_that_was_through_has_no_stage():
    error = world_failure({0: OK, 1: DIED}, [at(0, "tail"), at(1, "tail")], timeout_s=9.0)
    assert [status.stage for status in error.ranks] == [None, "tail"]


def test_what_a_rank_says_itself_beats_what_the_store_last_heard():
    error = world_failure({0: RAISED}, [at(0, "glue_in")], timeout_s=9.0)
    assert error.ranks[0].stage == "route"
