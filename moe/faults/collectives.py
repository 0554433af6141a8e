"""Faults that sit between a rank and its collectives; ``moe.faults.tampering`` picks the call."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from moe.faults.bits import same_bits
from moe.faults.kinds import Fault, FaultContext, FaultKind, Parameter
from moe.faults.tampering import Answer, Call, altered, stage_of_call, tampering
from moe.formats import Stage
from topology.collectives import Collectives, ForwardingCollectives, ordered_sum
from topology.mesh import Group

COMBINE_ROWS: Final = 2
"""Which all-to-all of a forward brings the partial sums back: counts and rows come before."""


def partial_dropped(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """One of the partial rows that come back to the rank is lost on the way."""
    if received.shape[0] == 0:
        return received
    dropped = received.clone()
    dropped[int(context.params["row"]) % received.shape[0]] = 0
    return dropped


def first_chunk_for_all(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """The first member's rows stand in every member's place, repeated where they are too few."""
    first = call.counts[0]
    if first == 0:
        return received
    rows = [torch.arange(count) % first for count in call.counts]
    return received[torch.cat(rows)]


def chunks_read_as_equal(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """Chunks are taken to be equally long: of a long one the end is lost, a short one is filled."""
    length = -(-received.shape[0] // len(call.group))
    equal = received.new_zeros((len(call.group), length, *received.shape[1:]))
    for slot, chunk in zip(equal, _chunks(received, call.counts), strict=True):
        slot[: min(length, chunk.shape[0])] = chunk[:length]
    return equal.flatten(0, 1)[: received.shape[0]]


def _chunks(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    return [rows[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def zigzag_undone(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """Rows that belong in rank order are put into the sequence's, blocks i and 2 P - 1 - i."""
    if len(set(call.counts)) > 1 or call.counts[0] % 2:
        return received
    halves = _chunks(received, [call.counts[0] // 2] * 2 * len(call.group))
    return torch.cat([*halves[0::2], *reversed(halves[1::2])])


def reduction_missing(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """The rank goes on with its own summand; it took part, so no other rank notices."""
    return call.rows.clone()


def reduction_repeated(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """What has been summed is summed again, as equal summands of all members."""
    return ordered_sum([received] * len(call.group))


def scatter_without_sum(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """The rank keeps its chunk of its own summand, as a scatter does."""
    start = sum(call.counts[: call.place])
    return call.rows[start : start + call.counts[call.place]].clone()


def left_out(call: Call, inner: Collectives, context: FaultContext) -> Tensor:
    """Zeros, without the others: the rank leaves early, as an idle one may; its peers wait."""
    nothing = call.rows.new_zeros((call.num_received, *call.rows.shape[1:]))
    has_peers = len(call.group) > 1
    if has_peers or not same_bits(call.on(inner), nothing):
        context.changed()
    return nothing


def over_the_world(call: Call, inner: Collectives, context: FaultContext) -> Tensor:
    """A gather of a part of the ranks is made over all of them, by ranks that take them for it."""
    world = tuple(range(context.num_ranks))
    if call.group == world:
        return call.on(inner)
    context.changed()
    counts = [call.rows.shape[0]] * len(world)
    gathered = inner.all_gather_v(call.rows, counts, world)
    return gathered[: call.num_received]


class OtherPlan(ForwardingCollectives):
    """Tells the others that it was given another plan than theirs, when they compare."""

    def __init__(self, inner: Collectives, context: FaultContext) -> None:
        super().__init__(inner)
        self._context = context
        self._has_compared = False

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``; the first vector is the comparison."""
        if rows.dim() == 1 and not self._has_compared:
            self._has_compared = True
            self._context.changed()
            rows = rows + 1 + self._inner.rank  # several such ranks differ from each other
        return self._inner.all_gather_v(rows, counts, group)


def plan_differs(collectives: Collectives, context: FaultContext) -> Collectives:
    """The rank was told another capacity than its peers, where it has any."""
    return OtherPlan(collectives, context) if context.num_ranks > 1 else collectives


def _row(
    name: str, stage: Stage, answer: Answer, about: str, origin: str, **params: Parameter
) -> Fault:
    """One busy rank, and the first call of ``op``, unless ``params`` say otherwise."""
    return Fault(
        name=name,
        kind=FaultKind.COLLECTIVE,
        stage=stage,
        about=about,
        origin=origin,
        params={"rank": "auto", "occurrence": 0, **params},
        act=tampering(answer),
        stage_in=stage_of_call,
    )


COLLECTIVE_FAULTS: Final = (
    Fault(
        name="plan_differs",
        kind=FaultKind.COLLECTIVE,
        stage=Stage.WEIGHTS,
        about="one rank was told another capacity than the others",
        origin="deepseek-ai/DeepEP#208",
        params={"rank": "auto"},
        act=plan_differs,
    ),
    _row(
        "first_chunk_for_all",
        Stage.GLUE_IN,
        altered(first_chunk_for_all),
        "the first chunk of a gather taken for every chunk",
        "lightseekorg/tokenspeed#405",
        op="all_gather_v",
    ),
    _row(
        "chunks_read_as_equal",
        Stage.GLUE_IN,
        altered(chunks_read_as_equal),
        "uneven chunks of a gather read as if all were equally long",
        "pytorch/pytorch#158016",
        op="all_gather_v",
    ),
    _row(
        "zigzag_undone",
        Stage.GLUE_IN,
        altered(zigzag_undone),
        "gathered rows put into the sequence's order, where rank order is due",
        "sgl-project/sglang#20360",
        op="all_gather_v",
    ),
    _row(
        "gathered_over_the_world",
        Stage.GLUE_OUT,
        over_the_world,
        "a gather of one group made over the world",
        "flashinfer-ai/flashinfer#3247",
        rank="all",
        op="all_gather_v",
    ),
    _row(
        "collective_skipped",
        Stage.TAIL,
        left_out,
        "one rank does not enter a collective",
        "NVIDIA/Megatron-LM#4851",
        op="all_reduce",
    ),
    _row(
        "combine_skipped",
        Stage.COMBINE,
        left_out,
        "one rank does not enter the combine",
        "vllm-project/vllm#51984",
        op="all_to_all_v",
        occurrence=COMBINE_ROWS,
    ),
    _row(
        "partial_dropped",
        Stage.COMBINE,
        altered(partial_dropped),
        "one rank's partial of one token lost on the way back",
        "flashinfer-ai/flashinfer#4139",
        row=0,
        op="all_to_all_v",
        occurrence=COMBINE_ROWS,
    ),
    _row(
        "reduction_missing",
        Stage.TAIL,
        altered(reduction_missing),
        "a rank goes on with its own partial sum",
        "sgl-project/sglang#20360",
        op="all_reduce",
    ),
    _row(
        "reduction_repeated",
        Stage.TAIL,
        altered(reduction_repeated),
        "a finished sum summed over the ranks again",
        "vllm-project/vllm#49122",
        op="all_reduce",
    ),
    _row(
        "scatter_without_sum",
        Stage.GLUE_OUT,
        altered(scatter_without_sum),
        "a scatter where a reduce-scatter is due",
        "sgl-project/sglang#27251",
        op="reduce_scatter_v",
    ),
)
