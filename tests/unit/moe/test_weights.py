"""What a checkpoint's weights are, before anything is prepared."""

import pytest
import torch

from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, checkpoint_weights


class HandWrittenSource:
    """A weight source that remembers which experts were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.common_weights = CommonWeights(
            shared=None,
            gate_weight=torch.ones(8, 4, dtype=torch.bfloat16),
            correction_bias=torch.arange(8.0),
            tid2eid=torch.zeros(3, 2, dtype=torch.int32),
        )

    def experts(self, expert_ids):
        self.asked += expert_ids
        matrix = ExpertMatrix(values=torch.zeros(2, 4, 4, dtype=torch.bfloat16), scale=None)
        return ExpertWeights(w13=matrix, w2=matrix)

    def common(self) -> CommonWeights:
        return self.common_weights


def test_a_rank_asks_for_the_experts_it_holds():
    source = HandWrittenSource()
    weights = checkpoint_weights(source, [4, 5])
    assert source.asked == [4, 5]
    assert (weights.expert_ids.tolist(), weights.expert_ids.dtype) == ([4, 5], torch.int64)


@pytest.mark.parametrize("name", ["shared", "gate_weight", "correction_bias", "tid2eid"])
def test_a_rank_has_what_every_rank_holds(name):
    source = HandWrittenSource()
    got = getattr(checkpoint_weights(source, [4, 5]), name)
    assert got is getattr(source.common_weights, name)


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.bfloat16, 96), (torch.float8_e4m3fn, 96), (torch.uint8, 192)]
)
def test_a_byte_holds_two_columns_of_fp4(dtype, columns):
    matrix = ExpertMatrix(values=torch.zeros(1, 2, 96, dtype=dtype), scale=None)
    assert matrix.in_features == columns
