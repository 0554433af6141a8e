"""Drawn batches over one to six ranks, and the pipeline from dispatch to combine on them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.formats import GemmLayout, ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.permute import PermuteContext
from moe.permute.deepep_normal import post_permute, pre_permute
from moe.quant.fp8 import quantize_blocks, quantize_groups
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import (
    CombineOutput,
    DeepEpNormalDispatchOutput,
    Gemm2Output,
    PhysicalIds,
    PrePermuteOutput,
)
from moe.weights import ExpertMatrix, requantize_ue8m0
from topology.loopback import LoopbackWorld

WIDTH = 128
Token = tuple[int, ...]
"""Experts of one token by slot, -1 = dropped."""


@dataclass(frozen=True)
class Batch:
    """Tokens by rank; ranks own equal contiguous blocks of experts."""

    num_experts: int
    top_k: int
    tokens: tuple[tuple[Token, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    def on_one_rank(self) -> "Batch":
        """The same tokens in the same order, all experts beside them."""
        together = tuple(token for rank in self.tokens for token in rank)
        return Batch(self.num_experts, self.top_k, (together,))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_ranks, num_local = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    num_experts = num_ranks * num_local
    top_k = draw(st.integers(1, min(3, num_experts)))
    route = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    dropped = st.lists(st.booleans(), min_size=top_k, max_size=top_k)
    token = st.tuples(route, dropped).map(
        lambda pair: tuple(-1 if drop else expert for expert, drop in zip(*pair, strict=True))
    )
    tokens = st.lists(token, max_size=4).map(tuple)
    return Batch(num_experts, top_k, tuple(draw(tokens) for _ in range(num_ranks)))


NOBODY_HAS_A_TOKEN = Batch(4, 2, ((), ()))
ALL_DROPPED = Batch(2, 1, (((-1,), (-1,)), ((-1,),)))
ONE_HOT_EXPERT = Batch(6, 1, (((5,),) * 4, (), ((5,),) * 3))


def some_batches(test: Callable[..., None]) -> Callable[..., None]:
    """Run a law on drawn batches and on those that break most often."""
    for batch in (NOBODY_HAS_A_TOKEN, ALL_DROPPED, ONE_HOT_EXPERT):
        test = example(batch)(test)
    return settings(max_examples=20)(given(batches())(test))


@dataclass(frozen=True)
class RankRun:
    """What one rank saw."""

    sent: DeepEpNormalDispatchOutput
    grouped: PrePermuteOutput
    output: Tensor
    combined: CombineOutput


Experts = Callable[[PrePermuteOutput, range], Tensor]
"""(grouped rows, global ids of the local experts) -> [M, H] bf16"""


def hidden_of(number: int) -> Tensor:
    """[WIDTH] bf16 of the token with this global number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(WIDTH, generator=generator).to(torch.bfloat16)


def weights_of(number: int, top_k: int) -> Tensor:
    """[K] fp32 of the token with this global number."""
    return torch.rand(top_k, generator=torch.Generator().manual_seed(1000 + number))


def forward(
    batch: Batch,
    experts: Experts,
    *,
    scale_format: ScaleFormat = ScaleFormat.NONE,
    numbers: list[int] | None = None,
    seed: int = 0,
) -> list[RankRun]:
    """Dispatch, experts and combine on every rank; ``numbers`` names the tokens in global order."""
    starts = [sum(map(len, batch.tokens[:rank])) for rank in range(batch.num_ranks + 1)]
    numbers = list(range(starts[-1])) if numbers is None else numbers
    quantize = None
    if scale_format is not ScaleFormat.NONE:
        quantize = partial(quantize_groups, scale_format=scale_format)
    context = PermuteContext(
        num_local_experts=batch.num_local,
        num_experts=batch.num_experts,
        layout=GemmLayout.CONTIG,
        row_alignment=128,
        routed_scaling_factor=1.0,
        quantize=quantize,
    )

    def program(verbs) -> RankRun:
        mine, rank = batch.tokens[verbs.rank], verbs.rank
        own = numbers[starts[rank] : starts[rank + 1]]
        dispatcher = DeepEpNormalDispatcher(
            collectives=verbs,
            group=tuple(range(batch.num_ranks)),
            num_local_experts=batch.num_local,
            expert_alignment=128,
            quantize=quantize,
            arrival_seed=seed + rank,
        )
        sent = dispatcher.dispatch(
            stacked([hidden_of(n) for n in own], WIDTH, torch.bfloat16),
            PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, batch.top_k)),
            stacked([weights_of(n, batch.top_k) for n in own], batch.top_k, torch.float32),
        )
        grouped = pre_permute(sent, context)
        held = range(rank * batch.num_local, (rank + 1) * batch.num_local)
        output = experts(grouped, held)
        partial_sums = post_permute(Gemm2Output(output=output), grouped.restore, context)
        return RankRun(sent, grouped, output, dispatcher.combine(partial_sums, sent.handle))

    return LoopbackWorld(batch.num_ranks).run(program)


def stacked(rows: list[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, width, dtype=dtype)


def identity(grouped: PrePermuteOutput, held: range) -> Tensor:
    return grouped.rows.hidden_states


@cache
def expert_matrices(expert: int, scale_format: ScaleFormat) -> tuple[ExpertMatrix, ExpertMatrix]:
    """w13 [1, 2 * WIDTH, WIDTH] and w2 [1, WIDTH, WIDTH] of one global expert."""
    generator = torch.Generator().manual_seed(2000 + expert)
    drawn = (torch.randn(1, n, WIDTH, generator=generator) / 8 for n in (2 * WIDTH, WIDTH))
    first, second = (checkpoint_form(matrix.to(torch.bfloat16), scale_format) for matrix in drawn)
    return first, second


def checkpoint_form(values: Tensor, scale_format: ScaleFormat) -> ExpertMatrix:
    if scale_format is ScaleFormat.NONE:
        return ExpertMatrix(values=values, scale=None)
    blocks = quantize_blocks(values, ScaleFormat.FP32)
    matrix = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    return requantize_ue8m0(matrix) if scale_format is ScaleFormat.UE8M0 else matrix


def stack_of(matrices: list[ExpertMatrix]) -> ExpertMatrix:
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    return ExpertMatrix(
        values=torch.cat([matrix.values for matrix in matrices]),
        scale=torch.cat(scales) if scales else None,
    )


def mlp(scale_format: ScaleFormat) -> Experts:
    """Real experts: each global expert has weights of its own."""
    gemm = TorchGemm()
    quantize = None
    if scale_format is not ScaleFormat.NONE:
        quantize = partial(quantize_groups, scale_format=scale_format)
    runner = RunnerCore(gemm=gemm, quantize=quantize, swiglu_limit=10.0)

    def run(grouped: PrePermuteOutput, held: range) -> Tensor:
        pairs = [expert_matrices(expert, scale_format) for expert in held]
        loaded = LoadedExperts(
            w13=gemm.load(stack_of([w13 for w13, _ in pairs])),
            w2=gemm.load(stack_of([w2 for _, w2 in pairs])),
        )
        return runner.run(grouped.rows, loaded, lambda _, value: value).output

    return run
