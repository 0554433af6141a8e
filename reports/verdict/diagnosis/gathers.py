"""Gathers of chunks: one for all, all of one length, or only the rank's own."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from topology.sync import Gather

Law = tuple[Mistake, str, Tensor]


def gathered_wrongly(case: Case) -> Iterator[Explanation]:
    """Each law, on the rank's whole gathered rows."""
    chunks, whole = _chunks(case), case.whole
    if chunks is None or whole.places is None:
        return
    laws = list(_laws(case, chunks))
    for mistake, words, value in laws:
        yield Explanation(
            mistake=mistake,
            words=words,
            explains=case.lawful((whole.got == value[whole.places]).all(1)),
            cost=bits_of_choice(len(laws)),
        )


def _chunks(case: Case) -> "Chunks | None":
    """What each member gives to the gather; None where it is no gather of chunks."""
    subject, rank = case.subject, case.rank
    if case.tensor not in ("hidden_states", "returned") or not case.check_is_move:
        return None
    world, group = tuple(subject.ranks), subject.layer.layout.attention_tp_group(rank)
    if case.stage is Stage.GLUE_IN:
        attention = subject.layer.layout.attention
        first = tuple(member for member in world if attention.coord(member, "tp") == 0)
        groups, name, tokens = [world, first, group], "own", subject.own_tokens
        due = subject.layer_tokens[rank]
    elif case.stage is Stage.GLUE_OUT:
        groups, name, tokens = [group], "output", subject.layer_tokens
        due = subject.own_tokens[rank]
    else:
        return None
    stage = Stage.GLUE_IN if name == "own" else Stage.TAIL
    for members in groups:
        if torch.equal(torch.cat([tokens[member] for member in members]), due):
            held = {member: subject.stage(stage, member)[name].double() for member in members}
            return Chunks(held)
    return None


Chunks = dict[int, Tensor]
"""Member -> [n, H] float64 that it gives, in the order in which rows are due."""


def _laws(case: Case, given: Chunks) -> Iterator[Law]:
    """What a rank may make of its chunks."""
    chunks = list(given.values())
    counts = [len(chunk) for chunk in chunks]
    if counts[0]:
        rows = torch.cat([torch.arange(count) % counts[0] for count in counts])
        words = f"the first of {len(counts)} chunks stands in every chunk's place"
        yield Mistake.COLLECTIVE, words, chunks[0][rows]
    total = sum(counts)
    length = -(-total // len(counts))
    if len(set(counts)) > 1:
        words = f"chunks of {counts} rows are read as if each had {length}"
        yield Mistake.COLLECTIVE, words, _as_equal(chunks, length)[:total]
    if case.layer.sync.gather in (Gather.ALL_REDUCE, Gather.REDUCE_SCATTER_ALL_GATHER):
        yield from _own_alone(case, given)


def _as_equal(chunks: Sequence[Tensor], length: int) -> Tensor:
    """The beginning of each, filled up with zeros."""
    equal = chunks[0].new_zeros((len(chunks), length, chunks[0].shape[1]))
    for slot, chunk in zip(equal, chunks, strict=True):
        slot[: min(length, len(chunk))] = chunk[:length]
    return equal.flatten(0, 1)


def _own_alone(case: Case, given: Chunks) -> Iterator[Law]:
    """A gather by a sum with zeros: without the sum, all rows but the rank's own are zero."""
    alone = [
        chunk if member == case.rank else torch.zeros_like(chunk) for member, chunk in given.items()
    ]
    own = len(given.get(case.rank, ()))
    words = f"sum over the ranks missing: of the gathered rows, all but {own} of its own are zero"
    yield Mistake.SUM_MISSING, words, torch.cat(alone)
