"""Rows of the router that went wrong by themselves: an expert twice, another entry, no numbers."""

from collections.abc import Iterator

import torch

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import Table, identify, listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.rows import Rows


def chosen_twice(case: Case) -> Iterator[Explanation]:
    """Slots that repeat the expert of another one, where all other slots are right."""
    if (case.stage, case.tensor) != (Stage.ROUTE, "topk_ids"):
        return
    differs, same = case.got != case.want, case.got[:, :, None] == case.got[:, None, :]
    repeats = (same.sum(2) > 1) & (case.got >= 0)
    explains = differs.any(1) & (~differs | repeats).all(1)
    said = [
        f"{name_of(case.rows, at)} has expert {int(case.got[at, slot])} in slots "
        f"{same[at, slot].nonzero()[:, 0].tolist()}, due {int(case.want[at, slot])} in slot {slot}"
        for at in explains.nonzero()[:, 0].tolist()
        for slot in differs[at].nonzero()[:1, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.EXPERT_CHOICE,
        words=f"an expert chosen twice: {listed(said)}",
        explains=explains,
        cost=bits_of_choice(case.got.shape[1] - 1, int(differs[explains].sum())),
    )


def other_entries(case: Case) -> Iterator[Explanation]:
    """Experts that a table over token ids lists for another id."""
    if (case.stage, case.tensor) != (Stage.ROUTE, "topk_ids") or not case.layer.routing.hashed:
        return
    listed_experts = case.scene.weights.hash_table(case.rank).to(torch.float64)
    entries = Rows.of_rank(-1, len(listed_experts), torch.arange(len(listed_experts)))
    match = identify(case.got, Table(values=listed_experts, rows=entries))
    own = case.subject.stage(Stage.GLUE_IN, case.rank)["input_ids"][case.within]
    said = [
        f"{name_of(case.rows, at)}, whose id is {int(own[at])}, has those of id "
        f"{int(match.row[at])}" + (" (or of another alike)" if match.is_ambiguous[at] else "")
        for at in match.is_found.nonzero()[:, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.EXPERT_CHOICE,
        words=f"experts of another entry of the table over token ids: {listed(said)}",
        explains=match.is_found,
        cost=bits_of_choice(len(listed_experts), int(match.is_found.sum())),
    )


def scores_are_none(case: Case) -> Iterator[Explanation]:
    """Rows of NaN: scores that no expert can win, or weights divided by a sum of nothing."""
    if case.stage is not Stage.ROUTE or case.check_is_move:
        return
    traced = case.subject.stage(Stage.ROUTE, case.rank)
    if case.tensor not in ("logits", "topk_weights"):
        return
    is_none, has_none = case.got.isnan().all(1), (traced["topk_ids"][case.within] < 0).all(1)
    scoreless = traced["logits"][case.within].isnan().all(1)
    names = [name_of(case.rows, at) for at in (is_none & has_none).nonzero()[:, 0].tolist()]
    yield Explanation(
        mistake=Mistake.ROUTES_LOST,
        words=f"scores of {listed(names)} are no numbers, so no expert wins: all routes are lost",
        explains=is_none & has_none & scoreless,
    )
    yield Explanation(
        mistake=Mistake.TOPK_WEIGHTS,
        words=f"weights of {listed(names)}, which has no route, are 0 divided by their sum, 0",
        explains=is_none & has_none & ~scoreless,
    )
