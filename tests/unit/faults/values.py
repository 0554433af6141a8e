"""Small stage values that faults are let loose on."""

import torch

from moe.faults.kinds import FaultContext
from moe.stages import (
    ContigInput,
    DeepEpNormalDispatchOutput,
    DispatchHandle,
    MaskedInput,
    PrePermuteOutput,
    Restore,
    SharedExpertOutput,
    StandardDispatchOutput,
)
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights


def context(seen=None, rank=1, num_ranks=4, **params):
    return FaultContext(rank=rank, num_ranks=num_ranks, params=params, seen=seen or {})


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


def received(rows=3, scale=None):
    """Behind deepep_normal, on a rank with two experts."""
    none = torch.zeros(0, dtype=torch.int64)
    return DeepEpNormalDispatchOutput(
        physical_ids=torch.zeros(0, 2, dtype=torch.int32),
        wire=torch.zeros(0, 2),
        wire_scale=None,
        hidden_states=torch.arange(2.0 * rows).view(rows, 2),
        hidden_states_scale=scale,
        topk_ids=torch.tensor([[0, -1], [1, 0], [-1, 1]])[:rows],
        topk_weights=torch.ones(rows, 2),
        num_recv_tokens_per_expert=torch.tensor([128, 128]),
        handle=DispatchHandle(
            num_tokens=0,
            source_rank=none,
            source_row=none,
            sent_row=none,
            send_counts=none,
            recv_counts=none,
        ),
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


def permuted(m_indices=(0, 0, 1, 1)):
    """Two routes in rows 0 and 2 of the segments of two experts."""
    return PrePermuteOutput(
        rows=ContigInput(
            hidden_states=torch.zeros(len(m_indices), 1),
            hidden_states_scale=None,
            m_indices=torch.tensor(m_indices, dtype=torch.int32),
            live_rows=torch.tensor([0, 2]),
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
