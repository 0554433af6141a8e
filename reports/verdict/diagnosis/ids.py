"""Ids of another space: global for local, another mark for no route, wrapped, or dropped."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice

ID_TENSORS = ("topk_ids", "restore.topk_ids", "physical_ids", "handle.topk_ids")
PLACES_OF_MESSAGES = ("handle.target_rank", "handle.send_index")


def sent_to_first_rank(case: Case) -> Iterator[Explanation]:
    """Tokens that go to the first rank for a dropped route, whose -1 was divided to 0."""
    if case.stage is not Stage.DISPATCH or case.tensor not in PLACES_OF_MESSAGES:
        return
    sent = case.subject.stage(Stage.DISPATCH, case.rank)
    is_dropped = sent["physical_ids"][case.within] < 0
    is_to_first = sent["handle.target_rank"][case.within] == 0
    names = [name_of(case.rows, at) for at in range(len(case.here))]
    yield Explanation(
        mistake=Mistake.IDS,
        words=f"a dropped route taken for one to rank 0: {listed(names)} goes there, where no "
        "route of it is due",
        explains=((is_dropped & is_to_first) | ~case.wrong).all(1),
    )


def ids_wrong(case: Case) -> Iterator[Explanation]:
    """What was done to the ids of received rows, by the ids that are due."""
    if case.stage not in (Stage.DISPATCH, Stage.PRE_PERMUTE) or case.tensor not in ID_TENSORS:
        return
    got, want, wrong = (x.to(torch.float64) for x in (case.got, case.want, case.wrong))
    is_wrong = wrong > 0
    laws = [*_shifted(case, got, want), *_of_none(case, got, want)]
    for mistake, words, law in laws:
        yield Explanation(
            mistake=mistake,
            words=words,
            explains=(law | ~is_wrong).all(1),
            cost=bits_of_choice(len(laws)),
        )


Law = tuple[Mistake, str, Tensor]


def _shifted(case: Case, got: Tensor, want: Tensor) -> Iterator[Law]:
    """Ids of the rank's own slots that were left as all ranks count them, or lost."""
    layer = case.layer
    first = layer.ep_rank(case.rank) * layer.slots_per_rank
    if first:
        is_global = (want >= 0) & (got == want + first)
        words = f"ids left global: {int(is_global.sum())} are {first} too large, the rank's first"
        yield Mistake.IDS, f"{words} slot", is_global
    lost = (want >= 0) & (got == -1)
    rows = int(lost.any(1).sum())
    words = f"routes lost: {int(lost.sum())} ids of {rows} rows are -1 where a slot is due"
    yield Mistake.ROUTES_LOST, words, lost


def _of_none(case: Case, got: Tensor, want: Tensor) -> Iterator[Law]:
    """Where no route of this rank is due."""
    layer, slots = case.layer, case.layer.slots_per_rank
    absent = want == -1
    marks = torch.unique(got[absent & (case.wrong > 0)])
    if len(marks) == 1 and float(marks[0]) >= slots:
        mark = int(marks[0])
        words = f"absent routes marked {mark}, where -1 is due"
        yield Mistake.IDS, words, absent & (got == mark)
    physical = _physical(case)
    if physical is None:
        return
    first = layer.ep_rank(case.rank) * slots
    foreign = absent & (physical >= 0) & (got == (physical - first) % slots)
    words = f"{int((foreign & (case.wrong > 0)).sum())} ids of other ranks' slots taken for local"
    yield Mistake.IDS, f"{words} ones, modulo {slots}", foreign
    dropped = absent & (physical < 0) & (got == slots - 1)
    words = f"dropped routes computed: {int((dropped & (case.wrong > 0)).sum())} ids of -1 read "
    yield Mistake.IDS, f"{words}the last entry of the table, slot {slots - 1}", dropped
    held = (case.rows.token < 0)[:, None] & absent & (got >= 0)
    held &= got < len(layer.slot_experts)
    words = f"padding rows keep ids: {int((held & (case.wrong > 0)).sum())}, where -1 is due"
    yield Mistake.PADDING_LEAK, words, held


def _physical(case: Case) -> Tensor | None:
    """[W, K] physical ids of the wrong rows' sources, -1 = none; None where that is not known."""
    subject, places = case.subject, case.places
    source = subject.received_from[case.rank]
    if places is None or len(source) <= int(places.max()):
        return None
    ids = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.float64)
    from_row = source[places]
    none = torch.full((len(places), ids.shape[1]), -1.0, dtype=torch.float64)
    return torch.where((from_row >= 0)[:, None], ids[from_row.clamp(min=0)], none)
