"""Sums over ranks: a partial that is missing, doubled or another's; a sum left out or repeated.

No number multiplies a partial on its way into the sum, so its coefficient is a whole one or the row
is no sum of partials: every value of a row is evidence.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.sums import TermSum, law_of_rank
from topology.sync import Return


def summed_wrongly(case: Case) -> Iterator[Explanation]:
    """What the whole rank did: no sum, or a sum of what had been summed."""
    ranks = ranks_of(case.whole)
    if ranks is None or len(ranks.names) < 2:
        return
    own = torch.zeros_like(ranks.due)
    own[case.rank] = 1.0
    if not torch.equal(own, ranks.due):
        yield _of_rank(
            case,
            ranks,
            own,
            Mistake.SUM_MISSING,
            f"sum over the ranks missing: rank {case.rank} goes on with its own partial",
        )
    times = float(len(ranks.names)) if bool((ranks.due == 1).all()) else 1.0
    yield _of_rank(
        case,
        ranks,
        torch.full_like(ranks.due, times),
        Mistake.SUM_REPEATED,
        f"summed over {len(ranks.names)} ranks once more: every rank's partial has "
        f"coefficient {times:g}, where a sum is due only {_where(case)}",
    )


def _of_rank(case: Case, ranks: TermSum, law: Tensor, mistake: Mistake, words: str) -> Explanation:
    """One of the two laws of a whole rank."""
    explains = law_of_rank(case, ranks, law)
    return Explanation(
        mistake=mistake,
        words=words,
        explains=explains,
        cost=bits_of_choice(2),
    )


def partial_wrong(case: Case) -> Iterator[Explanation]:
    """What happened to single rows: by their fitted coefficients, rounded to whole numbers."""
    ranks = ranks_of(case)
    if ranks is None or not bool((ranks.due == 1).all()) or len(ranks.names) < 2:
        return
    counted = ranks.fitted().round().clamp(0, len(ranks.names)).nan_to_num(1.0)
    explains = ranks.explains(counted)
    lost, more = (counted == 0).any(0), (counted > 1).any(0)
    for mistake, which in (
        (Mistake.PARTIAL_MISSING, lost & ~more),
        (Mistake.PARTIAL_DOUBLED, more & ~lost),
        (Mistake.PARTIAL_OF_ANOTHER_RANK, lost & more),
    ):
        here = explains & which
        if bool(here.any()):
            yield Explanation(
                mistake=mistake,
                words=f"partial sums: {_said(case, ranks, counted, here)}",
                explains=here,
                cost=bits_of_choice(len(ranks.names) ** 2, int((counted != 1)[:, here].sum())),
            )


def _said(case: Case, ranks: TermSum, counted: Tensor, here: Tensor) -> str:
    """What happened to the sums, each with the rows that it happened to."""
    rows: dict[str, list[str]] = {}
    for at in here.nonzero()[:, 0].tolist():
        rows.setdefault(_counted(ranks, counted[:, at]), []).append(name_of(case.rows, at))
    return listed([f"{what} for {listed(names)}" for what, names in rows.items()])


def _counted(ranks: TermSum, counts: Tensor) -> str:
    """Whose partial is missing, and whose stands there too often."""
    lost = [ranks.names[rank] for rank in (counts == 0).nonzero()[:, 0].tolist()]
    more = [
        f"{ranks.names[rank]} {int(counts[rank])} times"
        for rank in (counts > 1).nonzero()[:, 0].tolist()
    ]
    missing = [f"{name} missing" for name in lost]
    return " and ".join([*missing, *more])


def _where(case: Case) -> str:
    """Who sums over the ranks."""
    return "in glue_out" if case.sums_in_glue else "once"


def ranks_of(case: Case) -> TermSum | None:
    """What each rank has for the wrong rows, where a stage adds that up."""
    subject = case.subject
    match case.stage, case.tensor:
        case Stage.TAIL, "reduced":
            return _of_tail(case, "summand", case.within)
        case Stage.TAIL, "output" if case.sums_in_glue:
            return _of_tail(case, "summand", case.within, only_own=True)
        case Stage.GLUE_OUT, ("hidden_states" | "returned") if subject.layer.sync.returning in (
            Return.REDUCE_SCATTER,
            Return.REDUCE_SCATTER_V,
        ):
            return _of_tail(case, "output", case.within + _slot_start(case))
        case Stage.COMBINE, "routed" if "partial" in subject.stage(Stage.POST_PERMUTE, case.rank):
            return _of_exchange(case)
    return None


def _of_tail(case: Case, name: str, rows: Tensor, *, only_own: bool = False) -> TermSum | None:
    """Rows of a tensor of the tail that all ranks have for the same tokens."""
    subject = case.subject
    if any(name not in subject.stage(Stage.TAIL, rank) for rank in subject.ranks):
        return None
    terms = torch.stack(
        [subject.stage(Stage.TAIL, rank)[name][rows].to(torch.float64) for rank in subject.ranks]
    )
    due = torch.ones(terms.shape[:2], dtype=torch.float64)
    if only_own:
        due[torch.arange(len(due)) != case.rank] = 0.0
    return TermSum(names=_names(case), terms=terms, due=due, got=case.got)


def _slot_start(case: Case) -> int:
    """The first of the gathered rows that the rank keeps."""
    sync, attention = case.layer.sync, case.layer.layout.attention
    axis = "cp" if attention.degree("cp") > 1 else "dp"
    return sum(sync.slots[: attention.coord(case.rank, axis)])


def _of_exchange(case: Case) -> TermSum | None:
    """What came back from each rank for the wrong rows, if routes' weights are in it already."""
    subject = case.subject
    if not subject.layer.is_all_to_all:
        return None
    if "pending_weights" in subject.stage(Stage.POST_PERMUTE, case.rank):
        return None
    start, width = subject.layer_starts[case.rank], case.got.shape[1]
    number = torch.full((len(subject.layer_rows),), -1)
    number[start + case.within] = torch.arange(len(case.within))
    terms = torch.zeros(len(subject.ranks), *case.got.shape, dtype=torch.float64)
    for rank in subject.ranks:
        source = subject.received_from[rank]
        at = torch.where(source >= 0, number[source], -1)
        partial = subject.stage(Stage.POST_PERMUTE, rank)["partial"][at >= 0]
        terms[rank].index_add_(0, at[at >= 0], partial[:, :width].to(torch.float64))
    due = torch.ones(terms.shape[:2], dtype=torch.float64)
    return TermSum(names=_names(case), terms=terms, due=due, got=case.got)


def _names(case: Case) -> list[str]:
    return [f"rank {rank}'s partial" for rank in case.subject.ranks]
