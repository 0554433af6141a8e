"""Small quantised values that faults of scales are let loose on."""

from dataclasses import replace

import torch

from moe.formats import Stage
from moe.quant.ue8m0 import pack_ue8m0
from moe.stages import ActivationOutput, MaskedInput, PrePermuteOutput, SlabRestore
from moe.weights import ExpertMatrix, ExpertWeights
from tests.unit.faults.values import layer_weights, permuted


def words(*rows):
    """[rows, W] int32, MN-major: rows of exponents, four to a word."""
    return pack_ue8m0(torch.tensor(rows, dtype=torch.uint8))


def bytes_of(scale):
    """The bytes of packed scales, row by row."""
    row_major = scale.clone(memory_format=torch.contiguous_format)
    return row_major.view(torch.uint8).tolist()


def codes(*rows):
    """e4m3 codes of numbers."""
    return torch.tensor(rows).to(torch.float8_e4m3fn)


def activated(scale, activation=None):
    """An activation of four rows behind ``permuted()``, of which rows 0 and 2 are live."""
    rows = torch.zeros(4, 4) if activation is None else activation
    return ActivationOutput(
        activation=rows, hidden_states=codes(*rows.tolist()), hidden_states_scale=scale
    )


def seen(dispatched=None, rows=None):
    """What was handed on in front of an activation."""
    return {Stage.DISPATCH: dispatched, Stage.PRE_PERMUTE: rows or permuted()}


def quantised_slabs(scale, masked_m=(2, 1)):
    """Slabs of four rows of zeros in front of the first GEMM."""
    return PrePermuteOutput(
        rows=MaskedInput(
            hidden_states=torch.zeros(len(masked_m), 4, 2),
            hidden_states_scale=scale,
            masked_m=torch.tensor(masked_m, dtype=torch.int32),
            expected_m=1,
        ),
        restore=SlabRestore(topk_weights=torch.ones(1, 1)),
    )


def weights_of(matrix, num_local=1):
    """A rank whose experts' matrices are both this one."""
    return replace(layer_weights(num_local=num_local), experts=ExpertWeights(w13=matrix, w2=matrix))


def packed_weights(*rows, group_size=32):
    """One expert whose rows have these exponents, one for each group of columns."""
    values = torch.zeros(1, len(rows), len(rows[0]) * group_size).to(torch.float8_e4m3fn)
    scale = pack_ue8m0(torch.tensor([rows], dtype=torch.uint8))
    return weights_of(ExpertMatrix(values=values, scale=scale, group_size=group_size))
