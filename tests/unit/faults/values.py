"""Small stage values that faults are let loose on."""

import torch

from moe.dispatched import (
    DeepEpNormalDispatchOutput,
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    DeepEpV2Handle,
    DispatchHandle,
    ExpandedHandle,
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    FlashInferHandle,
    GatheredHandle,
    LowLatencyDispatchOutput,
    LowLatencyHandle,
    StandardDispatchOutput,
)
from moe.faults.kinds import FaultContext
from moe.stages import ContigInput, MaskedInput, PrePermuteOutput, Restore, SharedExpertOutput
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights


def context(seen=None, earlier=None, rank=1, num_ranks=4, num_slots=0, **params):
    return FaultContext(
        rank=rank,
        num_ranks=num_ranks,
        num_slots=num_slots,
        params=params,
        seen=seen or {},
        earlier=earlier or {},
    )


def layer_weights(values=None, scale=None, bias=None, num_local=1, num_experts=1):
    matrix = ExpertMatrix(values=torch.zeros(1, 2, 1) if values is None else values, scale=scale)
    return LayerWeights(
        expert_ids=torch.arange(num_local),
        experts=ExpertWeights(w13=matrix, w2=matrix),
        shared=None,
        gate_weight=torch.zeros(num_experts, 1),
        correction_bias=bias,
    )


def shared_output(value):
    rows = torch.full((1, 1), value, dtype=torch.bfloat16)
    return SharedExpertOutput(
        input=rows,
        input_scale=None,
        gate_up=rows,
        activation=rows,
        hidden_states=rows,
        hidden_states_scale=None,
        output=rows,
    )


NONE = torch.zeros(0, dtype=torch.int64)
NO_IDS = torch.zeros(0, 2, dtype=torch.int32)
LOCAL_IDS = torch.tensor([[0, -1], [1, 0], [-1, 1]])


def numbered(*shape):
    """Rows of two columns that count up."""
    return torch.arange(2.0 * torch.Size(shape).numel()).view(*shape, 2)


def received(rows=3, scale=None):
    """Behind deepep_normal, on a rank with two experts."""
    return DeepEpNormalDispatchOutput(
        physical_ids=NO_IDS,
        wire=torch.zeros(0, 2),
        wire_scale=None,
        hidden_states=numbered(rows),
        hidden_states_scale=scale,
        topk_ids=LOCAL_IDS[:rows],
        topk_weights=torch.ones(rows, 2),
        num_recv_tokens_per_expert=torch.tensor([128, 128]),
        handle=DispatchHandle(
            num_tokens=0,
            source_rank=NONE,
            source_row=NONE,
            sent_row=NONE,
            send_counts=NONE,
            recv_counts=NONE,
        ),
    )


def v2_handle(num_tokens):
    return DeepEpV2Handle(
        num_tokens=num_tokens,
        source_rank=NONE,
        source_row=NONE,
        sent_row=NONE,
        send_counts=NONE,
        recv_counts=NONE,
        first_slot=NONE,
    )


def received_v2(num_tokens=0):
    """Behind deepep_v2: the same three rows, two routes to each of two experts."""
    return DeepEpV2DispatchOutput(
        physical_ids=NO_IDS,
        wire=torch.zeros(0, 2),
        wire_scale=None,
        hidden_states=numbered(3),
        hidden_states_scale=None,
        topk_ids=LOCAL_IDS,
        topk_weights=torch.ones(3, 2),
        psum=torch.tensor([128, 256], dtype=torch.int32),
        handle=v2_handle(num_tokens),
    )


def expanded(message=(0, 1, -1, 1), psum=(2, 129)):
    """Behind deepep_v2, one row a route: where ``message`` is not -1."""
    messages = torch.tensor(message)
    return DeepEpV2ExpandedDispatchOutput(
        physical_ids=NO_IDS,
        wire=torch.zeros(0, 2),
        wire_scale=None,
        hidden_states=numbered(len(message)),
        hidden_states_scale=None,
        topk_weights=torch.full((len(message),), 0.5),
        psum=torch.tensor(psum, dtype=torch.int32),
        masked_max_m=128,
        expected_m=1,
        handle=ExpandedHandle(
            source_rank=messages,
            source_row=messages,
            source_slot=messages,
            message=messages,
            messages=v2_handle(0),
        ),
    )


def slabs(masked_m=(2, 1), first=0.0):
    """Behind low latency: slabs of four rows with ``masked_m`` real ones, numbered from first."""
    counts = torch.tensor(masked_m, dtype=torch.int32)
    num_slabs = len(masked_m)
    return LowLatencyDispatchOutput(
        physical_ids=NO_IDS,
        topk_weights=torch.zeros(0, 2),
        hidden_states=first + numbered(num_slabs, 4),
        hidden_states_scale=first + torch.arange(4.0 * num_slabs).view(num_slabs, 4, 1),
        masked_m=counts,
        expected_m=1,
        handle=LowLatencyHandle(
            topk_ids=NO_IDS,
            source_row=torch.zeros(num_slabs, 4, dtype=torch.int32),
            begin=torch.zeros(num_slabs, 2, dtype=torch.int32),
            count=torch.stack([counts, torch.zeros_like(counts)], dim=1),
        ),
    )


def written(counts=(1, 2), ids=((5, 2), (-1, -1), (3, 4), (2, 6))):
    """Behind flashinfer in decode: room for two rows from each of two ranks."""
    return FlashInferDispatchOutput(
        physical_ids=NO_IDS,
        hidden_states=numbered(4),
        topk_ids=torch.tensor(ids, dtype=torch.int32),
        topk_weights=torch.ones(4, 2),
        handle=FlashInferHandle(target_rank=NO_IDS, send_index=NO_IDS, counts=torch.tensor(counts)),
    )


def gathered():
    """Behind flashinfer in prefill: three rows, ids made local."""
    return FlashInferGatheredOutput(
        physical_ids=NO_IDS,
        hidden_states=numbered(3),
        topk_ids=LOCAL_IDS.to(torch.int32),
        topk_weights=torch.ones(3, 2),
        handle=GatheredHandle(counts=torch.tensor([1, 2])),
    )


def kept(physical_ids, topk_ids):
    """Behind standard: every row stays."""
    ids, local = (torch.tensor(i, dtype=torch.int32) for i in (physical_ids, topk_ids))
    return StandardDispatchOutput(
        physical_ids=ids,
        hidden_states=torch.arange(2.0 * len(ids)).view(len(ids), 2),
        topk_ids=local,
        topk_weights=torch.ones(ids.shape),
    )


def permuted(m_indices=(0, 0, 1, 1), live=(0, 2), scale=None):
    """Two routes in rows 0 and 2 of the segments of two experts; row i is all i."""
    return PrePermuteOutput(
        rows=ContigInput(
            hidden_states=torch.arange(1.0 * len(m_indices))[:, None],
            hidden_states_scale=scale,
            m_indices=torch.tensor(m_indices, dtype=torch.int32),
            live_rows=torch.tensor(live),
        ),
        restore=_two_routes(0, 2),
    )


def in_slabs(masked_m=(1, 1), height=2):
    """The same routes in the first rows of two slabs."""
    return PrePermuteOutput(
        rows=MaskedInput(
            hidden_states=torch.zeros(len(masked_m), height, 1),
            hidden_states_scale=None,
            masked_m=torch.tensor(masked_m, dtype=torch.int32),
            expected_m=1,
        ),
        restore=_two_routes(0, height),
    )


def _two_routes(first, second):
    return Restore(
        topk_ids=torch.tensor([[0, -1], [1, -1]]),
        topk_weights=torch.tensor([[0.5, 0.0], [0.25, 0.0]]),
        output_index=torch.tensor([[first, -1], [second, -1]]),
    )
