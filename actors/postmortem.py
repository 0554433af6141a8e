"""From how each rank ended and where it was to who is at fault, in one sentence."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.progress import START, Place, Whereabouts
from actors.world import RankStatus, WorldFailedError

UNPLACED = "unknown"
"""The node of a rank that never said where it runs."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankEnd:
    """How one rank answered a call; a silent rank has none.

    state   ok, raised or died
    answer  what it returned, when ok
    cause   what went wrong, otherwise
    place   where it was, as it said itself
    """

    state: str
    answer: Any = None
    cause: str = ""
    place: Place | None = None

    @property
    def is_root(self) -> bool:
        """No other rank's end can have caused this one.

        A rank that raises inside a collective may only have lost a peer.
        """
        return self.state == "died" or (self.state == "raised" and not self._in_collective)

    @property
    def _in_collective(self) -> bool:
        return self.place is not None and self.place.op != ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blame:
    """Why a rank is at fault; the sentence reads "rank 2 <did> on <node>: <cause>"."""

    state: str
    did: str
    cause: str
    stage: str


def world_failure(
    ends: Mapping[int, RankEnd], seen: Sequence[Whereabouts], timeout_s: float
) -> WorldFailedError:
    """Who is at fault when a call did not come back well from every rank.

    Ranks that died or raised are at fault before those that are silent; of the silent ones those
    that compute, before those that wait in a collective; and when all wait, those that have
    entered fewer collectives than the others.

    Args:
        ends: the ranks that answered or ended, first one first.
        seen: what the store knows, for every rank.
        timeout_s: how long the call was waited for.
    """
    seen = [
        replace(one, place=ends[rank].place) if rank in ends and ends[rank].place else one
        for rank, one in enumerate(seen)
    ]
    ended = _ended_badly(ends, seen)
    blamed = ended or _silent(ends, seen, timeout_s)
    sentences = [_sentence(rank, seen[rank], blame) for rank, blame in blamed.items()]
    if not ended:
        sentences += _waiting(ends, seen, blamed)
    statuses = [_status(rank, one, ends, blamed) for rank, one in enumerate(seen)]
    return WorldFailedError("; ".join(sentences), statuses)


def _ended_badly(ends: Mapping[int, RankEnd], seen: Sequence[Whereabouts]) -> dict[int, _Blame]:
    bad = {rank: end for rank, end in ends.items() if end.state != "ok"}
    roots = [rank for rank, end in bad.items() if end.is_root] or list(bad)[:1]
    return {
        rank: _Blame(
            state=bad[rank].state,
            did=f"{bad[rank].state} {_where(seen[rank])}",
            cause=bad[rank].cause,
            stage=_stage(seen[rank]),
        )
        for rank in sorted(roots)
    }


def _silent(
    ends: Mapping[int, RankEnd], seen: Sequence[Whereabouts], timeout_s: float
) -> dict[int, _Blame]:
    silent = [rank for rank in range(len(seen)) if rank not in ends]
    cause = f"no answer for {timeout_s:g} s"
    computing = [rank for rank in silent if not _op(seen[rank])]
    if computing:
        return {rank: _hung(seen[rank], cause) for rank in computing}
    furthest = max((seen[rank].place for rank in silent), key=_entered)
    assert furthest is not None
    behind = [rank for rank, one in enumerate(seen) if _entered(one.place) < furthest.entered]
    return {
        rank: _left_out(furthest) if rank in ends else _hung(seen[rank], cause)
        for rank in behind or silent
    }


def _hung(one: Whereabouts, cause: str) -> _Blame:
    if one.place is None:
        return _Blame(state="not_started", did="did not start", cause=cause, stage=START)
    return _Blame(state="hung", did=f"hung {_where(one)}", cause=cause, stage=one.place.stage)


def _left_out(missed: Place) -> _Blame:
    """A rank that returned while its peers wait for it in a collective."""
    cause = f"its forward ended without {missed.op} of stage {missed.stage}"
    return _Blame(state="hung", did="returned", cause=cause, stage=missed.stage)


def _waiting(
    ends: Mapping[int, RankEnd], seen: Sequence[Whereabouts], blamed: Mapping[int, _Blame]
) -> list[str]:
    """Who waits where, one sentence a place."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(seen):
        if rank not in ends and rank not in blamed:
            places[_where(one)].append(rank)
    return [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)} "
        f"{where}"
        for where, ranks in places.items()
    ]


def _status(
    rank: int, one: Whereabouts, ends: Mapping[int, RankEnd], blamed: Mapping[int, _Blame]
) -> RankStatus:
    status = RankStatus(rank=rank, node=one.node or UNPLACED, pid=one.pid, device="cpu", state="ok")
    if rank in blamed:
        blame = blamed[rank]
        return replace(status, state=blame.state, stage=blame.stage, cause=blame.cause)
    if rank in ends and ends[rank].state == "ok":
        return status
    started = one.place is not None
    return replace(status, state="released" if started else "not_started", stage=_stage(one))


def _sentence(rank: int, one: Whereabouts, blame: _Blame) -> str:
    home = f" on {one.node} (pid {one.pid})" if one.node else ""
    return f"rank {rank} {blame.did}{home}: {blame.cause.splitlines()[0]}"


def _where(one: Whereabouts) -> str:
    op = _op(one)
    return f"in {op} of stage {_stage(one)}" if op else f"in stage {_stage(one)}"


def _stage(one: Whereabouts) -> str:
    return one.place.stage if one.place else START


def _op(one: Whereabouts) -> str:
    return one.place.op if one.place else ""


def _entered(place: Place | None) -> int:
    return place.entered if place else 0
