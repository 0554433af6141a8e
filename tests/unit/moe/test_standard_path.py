"""The path without an all-to-all, from dispatch to tail on every rank, against the golden.

Every sum here is exact in fp32 (small integers, weights that are powers of two), so what differs
from a sum of everything is the bf16 stores alone: pipeline and golden agree bit by bit, or one of
them stores somewhere else.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.dispatch.standard import StandardDispatcher
from moe.formats import GatedActivation, GemmLayout, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import (
    GoldenModel,
    GoldenRouting,
    GoldenTrace,
    RoundingPath,
    SharedInSum,
    golden_forward,
)
from moe.grouped_gemm import TorchGemm
from moe.permute import PermuteContext
from moe.permute.standard import post_permute, pre_permute
from moe.runner import LoadedExperts, RunnerCore
from moe.shards import shard_experts
from moe.stages import PhysicalIds
from moe.tail import SharedAfterSumTail, SharedBeforeSumTail, SharedExpert
from moe.weights import ExpertMatrix, ExpertWeights

TOKENS, WIDTH, INTERMEDIATE, EXPERTS, EP, FACTOR = 40, 128, 256, 4, 2, 1.5
GATE = 32.0
"""silu(32) is 32 in fp32, and to 13 digits otherwise."""


def integers(seed: int, *shape: int, limit: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).to(torch.bfloat16)


def experts(seed: int, count: int) -> ExpertWeights:
    """Gates read the first column, which is 1 in every token."""
    gate = torch.zeros(count, INTERMEDIATE, WIDTH, dtype=torch.bfloat16)
    gate[:, :, 0] = GATE
    w13 = torch.cat([gate, integers(seed, count, INTERMEDIATE, WIDTH)], dim=1)
    w2 = integers(seed + 1, count, WIDTH, INTERMEDIATE, limit=2)
    return ExpertWeights(
        w13=ExpertMatrix(values=w13, scale=None), w2=ExpertMatrix(values=w2, scale=None)
    )


ROUTED, SHARED = experts(1, EXPERTS), experts(3, 1)
X = integers(5, TOKENS, WIDTH)
X[:, 0] = 1
IDS = torch.tensor([[t % EXPERTS, (t + 1 + t // EXPERTS % 3) % EXPERTS] for t in range(TOKENS)])
IDS = IDS.to(torch.int32)
IDS[::7, 1] = -1
WEIGHTS = torch.tensor([[0.5, 0.25]]).repeat(TOKENS, 1)
RUNNER = RunnerCore(
    gemm=TorchGemm(), activation=GatedActivation(), scale_format=ScaleFormat.NONE, quantize=None
)


class Weights:
    """The same weights for the golden."""

    correction_bias = None
    intermediate_size = INTERMEDIATE
    gate_weight = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)

    def expert(self, expert: int) -> tuple[Tensor, Tensor]:
        return ROUTED.w13.values[expert].double(), ROUTED.w2.values[expert].double()

    def shared(self) -> tuple[Tensor, Tensor]:
        return SHARED.w13.values[0].double(), SHARED.w2.values[0].double()


def loaded(weights: ExpertWeights) -> LoadedExperts:
    gemm = TorchGemm()
    return LoadedExperts(w13=gemm.load(weights.w13), w2=gemm.load(weights.w2))


def shared_expert(weights: ExpertWeights) -> SharedExpert:
    return SharedExpert(weights=loaded(weights), runner=RUNNER, quantize=None)


def local_experts(ep_rank: int) -> ExpertWeights:
    held = slice(ep_rank * EXPERTS // EP, (ep_rank + 1) * EXPERTS // EP)
    return ExpertWeights(
        w13=ExpertMatrix(values=ROUTED.w13.values[held], scale=None),
        w2=ExpertMatrix(values=ROUTED.w2.values[held], scale=None),
    )


def combined(ep_rank: int, shard: int, moe_tp: int, layout: GemmLayout):
    """Dispatch to combine on one rank."""
    context = PermuteContext(
        num_local_experts=EXPERTS // EP,
        num_experts=EXPERTS,
        layout=layout,
        row_alignment=32,
        routed_scaling_factor=FACTOR,
        quantize=None,
    )
    dispatcher = StandardDispatcher(num_local_experts=EXPERTS // EP, ep_rank=ep_rank)
    sent = dispatcher.dispatch(X, PhysicalIds(IDS), WEIGHTS)
    grouped = pre_permute(sent, context)
    weights = loaded(shard_experts(local_experts(ep_rank), shard, moe_tp))
    output = RUNNER.run(grouped.rows, weights, lambda _, value: value)
    return dispatcher.combine(post_permute(output, grouped.restore, context), None)


def summed(parts: list[Tensor]) -> Tensor:
    return sum(part.float() for part in parts).to(torch.bfloat16)


def pipeline(path: RoundingPath) -> Tensor:
    """[T, H]: every rank's summand, their sum, and what belongs behind it."""
    summands, world = [], path.world_size
    for rank in range(world):
        ep_rank, shard = divmod(rank, path.moe_tp)
        part = None
        if path.shared is SharedInSum.SHARDED:
            part = shared_expert(shard_experts(SHARED, rank, world))
        elif path.shared is SharedInSum.FIRST_RANK and rank == 0:
            part = shared_expert(SHARED)
        tail = SharedBeforeSumTail(shared=part, reduce=None)
        routed = combined(ep_rank, shard, path.moe_tp, path.layout)
        summands.append(tail.finish(X, routed).summand)
    if path.shared is not SharedInSum.ABSENT:
        return summed(summands)
    after = SharedAfterSumTail(shared=shared_expert(SHARED), reduce=lambda _: summed(summands))
    return after.finish(X, routed).output


def golden(path: RoundingPath, *, rounding: bool = True) -> GoldenTrace:
    model = GoldenModel(
        routing=GoldenRouting(top_k=2, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=False),
        routed_scaling_factor=FACTOR,
        activation=GatedActivation(),
        recipe=QuantRecipe.BF16,
        scale_format=ScaleFormat.NONE,
        path=path,
    )
    return golden_forward(
        model, Weights(), X, rounding=rounding, topk_ids=IDS, topk_weights=WEIGHTS
    )


PATHS = [
    RoundingPath(ep_size=EP, moe_tp=moe_tp, folds_factor=True, shared=shared, layout=layout)
    for moe_tp in (1, 2)
    for shared in SharedInSum
    for layout in GemmLayout
]
EVERY_PATH = pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: f"tp{path.moe_tp}-{path.shared}-{path.layout}"
)


@EVERY_PATH
def test_every_rank_stores_where_the_golden_does(path):
    assert torch.equal(pipeline(path).double(), golden(path).output)


@EVERY_PATH
def test_these_stores_can_be_told_from_those_of_one_rank(path):
    one_rank = replace(path, ep_size=1, moe_tp=1, shared=SharedInSum.ABSENT)
    assert not torch.equal(golden(path).output, golden(one_rank).output)
