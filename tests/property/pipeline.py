"""The pipeline from dispatch to combine, in any form, over a drawn batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe.formats import DispatchFormat, GatedActivation, RunnerBackend, ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.permute import PermuteContext, permute_pair
from moe.poison import Fill, filled_with
from moe.quant.fp8 import quantize_blocks
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import CombineOutput, Gemm2Output, MaskedInput, PhysicalIds, PrePermuteOutput
from moe.weight_preparation import prepare_blocks
from moe.weights import ExpertMatrix
from tests.property.batches import Batch
from tests.property.forms import ALIGNMENT, FORMS, Form, Site, quantizer
from topology.collectives import ordered_sum
from topology.loopback import LoopbackWorld

WIDTH = 128


@dataclass(frozen=True)
class RankRun:
    """What one rank saw; ``sent`` is of the form's own type."""

    sent: Any
    grouped: PrePermuteOutput
    output: Tensor
    combined: CombineOutput


Experts = Callable[[PrePermuteOutput, range], Tensor]
"""(grouped rows, global ids of the local experts) -> [M, H] or [L, S, H] bf16"""


def hidden_of(number: int) -> Tensor:
    """[WIDTH] bf16 of the token with this global number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(WIDTH, generator=generator).to(torch.bfloat16)


def digits_of(number: int) -> Tensor:
    """[4] bf16: the token's number in base 16, and 1. Four bits each: small sums stay exact."""
    digits = (number // 256, number // 16 % 16, number % 16, 1)
    return torch.tensor(digits, dtype=torch.bfloat16)


def number_of(row: Tensor) -> int:
    """Whose ``digits_of`` a row is; -1 of a dummy's zeros."""
    high, middle, low, one = map(int, row.tolist())
    return high * 256 + middle * 16 + low if one else -1


def weights_of(number: int, top_k: int) -> Tensor:
    """[K] fp32 of the token with this global number."""
    return torch.rand(top_k, generator=torch.Generator().manual_seed(1000 + number))


def forward(
    batch: Batch,
    experts: Experts,
    *,
    form: Form = FORMS["deepep_normal"],
    scale_format: ScaleFormat = ScaleFormat.NONE,
    seed: int = 0,
    hidden: Callable[[int], Tensor] = hidden_of,
    weights: Callable[[int, int], Tensor] = weights_of,
    fill: Fill = Fill.NAN,
) -> list[RankRun]:
    """Dispatch, experts and combine on every rank."""
    starts = [sum(batch.counts[:rank]) for rank in range(batch.num_ranks + 1)]
    permute = permute_pair(form.dispatch_format, RunnerBackend.DEEP_GEMM)

    def program(verbs) -> RankRun:
        rank = verbs.rank
        own = range(starts[rank], starts[rank + 1])
        if form.dispatch_format is DispatchFormat.STANDARD:
            own = range(starts[-1])  # every rank has all rows
        dispatcher = form.dispatcher(
            Site(
                verbs=verbs,
                num_local=batch.num_local,
                top_k=batch.top_k,
                counts=batch.counts,
                scale_format=scale_format,
                seed=seed,
            )
        )
        ids = torch.tensor([batch.all_tokens[n] for n in own], dtype=torch.int32)
        sent = dispatcher.dispatch(
            stacked([hidden(n) for n in own], like=hidden(0)),
            PhysicalIds(ids.view(-1, batch.top_k)),
            stacked([weights(n, batch.top_k) for n in own], like=weights(0, batch.top_k)),
        )
        context = context_of(form, batch, rank, scale_format, seed)
        grouped = permute.pre(sent, context)
        held = range(rank * batch.num_local, (rank + 1) * batch.num_local)
        output = experts(grouped, held)
        back = permute.post(Gemm2Output(output=output), grouped.restore, context)
        return RankRun(sent, grouped, output, dispatcher.combine(back, sent.handle))

    def filled(verbs) -> RankRun:
        with filled_with(fill):
            return program(verbs)

    return LoopbackWorld(batch.num_ranks).run(filled)


def context_of(
    form: Form, batch: Batch, rank: int, scale_format: ScaleFormat, seed: int
) -> PermuteContext:
    return PermuteContext(
        num_local_experts=batch.num_local,
        num_experts=batch.num_experts,
        layout=form.layout,
        row_alignment=ALIGNMENT,
        routed_scaling_factor=1.0,
        quantize=quantizer(scale_format) if form.quantises_received else None,
        expert_start=rank * batch.num_local,
        slot_order_seed=seed + rank,
        caps_slabs=form.caps_slabs,
        wide_segments=form.wide_segments,
    )


def home(form: Form, runs: list[RankRun]) -> Tensor:
    """[all tokens, H] bf16 in global order, whoever adds the ranks' parts up."""
    routed = [run.combined.routed for run in runs]
    if form.dispatch_format is DispatchFormat.STANDARD:
        return ordered_sum(routed)
    return torch.cat(routed)


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_zeros(0, *like.shape)


def identity(grouped: PrePermuteOutput, held: range) -> Tensor:
    return grouped.rows.hidden_states


def scaled(grouped: PrePermuteOutput, held: range) -> Tensor:
    """Experts that multiply: another number each, so that a mixed-up expert shows."""
    factors = torch.tensor([1 + expert / 7 for expert in held])
    rows = grouped.rows
    if isinstance(rows, MaskedInput):
        factor = factors[:, None, None]
    else:
        factor = factors[rows.m_indices.clamp_min(0), None]
    return (rows.hidden_states.to(torch.float32) * factor).to(torch.bfloat16)


def live_rows(grouped: PrePermuteOutput) -> list[tuple[int, int]]:
    """(local expert, row counted over all slabs) of every grouped row that holds a route."""
    rows = grouped.rows
    if isinstance(rows, MaskedInput):
        height = rows.hidden_states.shape[1]
        counts = enumerate(rows.masked_m.tolist())
        return [(slab, slab * height + row) for slab, count in counts for row in range(count)]
    return [(int(rows.m_indices[row]), row) for row in rows.live_rows.tolist()]


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
    return prepare_blocks(ExpertMatrix(values=blocks.values, scale=blocks.scale_inv), scale_format)


def stack_of(matrices: list[ExpertMatrix]) -> ExpertMatrix:
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    return ExpertMatrix(
        values=torch.cat([matrix.values for matrix in matrices]),
        scale=torch.cat(scales) if scales else None,
    )


def mlp(scale_format: ScaleFormat) -> Experts:
    """Real experts: each global expert has weights of its own."""
    gemm = TorchGemm()
    runner = RunnerCore(
        gemm=gemm,
        activation=GatedActivation(limit=10.0),
        scale_format=scale_format,
        quantize=quantizer(scale_format),
    )

    def run(grouped: PrePermuteOutput, held: range) -> Tensor:
        pairs = [expert_matrices(expert, scale_format) for expert in held]
        loaded = LoadedExperts(
            w13=gemm.load(stack_of([w13 for w13, _ in pairs])),
            w2=gemm.load(stack_of([w2 for _, w2 in pairs])),
        )
        return runner.run(grouped.rows, loaded, lambda _, value: value).output

    return run
