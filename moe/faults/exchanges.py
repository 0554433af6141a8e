"""Collective faults of who gives what to whom: chunks, summands and partials of the wrong rank."""

from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from moe.faults.bits import same_bits
from moe.faults.collectives import COMBINE_ROWS, left_out
from moe.faults.kinds import Fault, FaultContext, FaultKind, Parameter
from moe.faults.tampering import Answer, Call, altered, stage_of_call, tampering
from moe.formats import Stage
from topology.collectives import Collectives, ordered_sum

_VECTOR: Final = 16
"""Bytes; a row of values is whole vectors, and its place is less than one."""


def chunks_of_next_rank(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """Every place holds the chunk of the member behind, as if peers were numbered from another."""
    return received.roll(-call.counts[0], dims=0)


def partial_doubled(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """One of the partial rows that come back to the rank counts twice."""
    if received.shape[0] == 0:
        return received
    doubled = received.clone()
    _partials(doubled)[int(context.params["row"]) % received.shape[0]] *= 2
    return doubled


def _partials(received: Tensor) -> Tensor:
    """[N, H] bf16 view of what comes back; low latency sends bytes, each row's place behind it."""
    if received.dtype == torch.bfloat16:
        return received
    return received[:, : received.shape[1] // _VECTOR * _VECTOR].view(torch.bfloat16)


def partial_of_another_rank(received: Tensor, call: Call, context: FaultContext) -> Tensor:
    """The first partial row of the second rank that sends some is the first rank's."""
    ends = accumulate(call.recv_counts)
    starts = [end - n for end, n in zip(ends, call.recv_counts, strict=True) if n]
    if len(starts) < 2:
        return received
    taken = received.clone()
    taken[starts[1]] = received[starts[0]]
    return taken


def summand_doubled(call: Call, inner: Collectives, context: FaultContext) -> Tensor:
    """The first member's summand stands in the last one's place, too; all members see that sum."""
    num_rows, members = call.rows.shape[0], len(call.group)
    if num_rows == 0:
        return call.on(inner)
    gathered = inner.all_gather_v(call.rows, [num_rows] * members, call.group)
    summands = list(gathered.view(members, *call.rows.shape))
    wrong = ordered_sum([*summands[:-1], summands[0]])
    if not same_bits(wrong, ordered_sum(summands)):
        context.changed()
    return wrong


def _row(
    name: str, stage: Stage, answer: Answer, about: str, origin: str, **params: Parameter
) -> Fault:
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


EXCHANGE_FAULTS: Final = (
    _row(
        "chunks_of_next_rank",
        Stage.GLUE_IN,
        altered(chunks_of_next_rank),
        "every chunk of a gather taken for that of the member in front",
        "kvcache-ai/Mooncake@1db7604a4",
        op="all_gather_v",
    ),
    _row(
        "idle_rank_leaves",
        Stage.DISPATCH,
        left_out,
        "a rank without tokens does not enter dispatch",
        "vllm-project/vllm#51984",
        rank="idle",
        op="all_to_all_v",
    ),
    _row(
        "partial_doubled",
        Stage.COMBINE,
        altered(partial_doubled),
        "one rank's partial of one token counted twice",
        "our own reading of retried sends",
        row=0,
        op="all_to_all_v",
        occurrence=COMBINE_ROWS,
    ),
    _row(
        "partial_of_another_rank",
        Stage.COMBINE,
        altered(partial_of_another_rank),
        "a rank's partial read from another one's place",
        "kvcache-ai/Mooncake@e8afe1c9d",
        op="all_to_all_v",
        occurrence=COMBINE_ROWS,
    ),
    _row(
        "summand_doubled",
        Stage.TAIL,
        summand_doubled,
        "one rank's summand in another one's place in a sum over the ranks",
        "vllm-project/vllm#2760",
        rank="all",
        op="all_reduce",
    ),
)
