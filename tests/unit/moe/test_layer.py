"""The stages of a layer, in order, and the runner inside it."""

import torch
from torch.nn.functional import pad

from moe.batch import LayerInput
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.token_exchange import TokenExchange
from moe.formats import (
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    RunnerBackend,
    ScaleFormat,
    ScoringFunc,
    Stage,
)
from moe.glue import Glue
from moe.grouped_gemm import TorchGemm
from moe.layer import MoeLayer, Router
from moe.permute import PermuteContext, permute_pair
from moe.placement import ExpertPlacement
from moe.routing import RoutingRule
from moe.runner import LoadedExperts, RunnerCore
from moe.tail import ReplicatedSharedTail
from moe.weights import ExpertMatrix
from topology.layout import ParallelLayout
from topology.loopback import LoopbackWorld
from topology.sync import SyncOptions, sync_plan

WIDTH = 64
SCALE_OF_EXPERT = (1.0, 2.0, 4.0, 8.0)


def experts(gemm: TorchGemm, padding: int) -> LoadedExperts:
    """Expert e computes SCALE_OF_EXPERT[e] * silu(x) * x, with zeros for columns of padding."""
    eye = torch.eye(WIDTH, dtype=torch.bfloat16)
    w13 = torch.cat([eye, eye]).repeat(4, 1, 1)
    w2 = torch.stack([scale * eye for scale in SCALE_OF_EXPERT])
    return LoadedExperts(
        w13=gemm.load(ExpertMatrix(values=pad(w13, (0, padding)), scale=None)),
        w2=gemm.load(ExpertMatrix(values=pad(w2, (0, 0, 0, padding)), scale=None)),
    )


def layer(verbs, num_tokens: int, padding: int = 0) -> MoeLayer:
    """Four experts on one rank; gate row e reads column e, so a token picks its largest column."""
    gemm = TorchGemm()
    layout = ParallelLayout(attn_dp=1, ep=1)
    plan = sync_plan(layout, [num_tokens], a2a=True, extend=True, options=SyncOptions())
    runner = RunnerCore(
        gemm=gemm, activation=GatedActivation(), scale_format=ScaleFormat.NONE, quantize=None
    )
    rule = RoutingRule(top_k=1, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True)
    return MoeLayer(
        glue=Glue(plan=plan, layout=layout, collectives=verbs),
        route=Router(
            gate_weight=torch.eye(4, WIDTH, dtype=torch.bfloat16),
            correction_bias=None,
            tid2eid=None,
            rule=rule,
            is_unrouted=None,
        ),
        placement=ExpertPlacement(num_experts=4, ep_size=1),
        expert_hidden_size=WIDTH + padding,
        dispatcher=DeepEpNormalDispatcher(
            exchange=TokenExchange(
                collectives=verbs, group=(0,), num_local_experts=4, arrival_seed=3
            ),
            expert_alignment=128,
            quantize=None,
        ),
        permute=permute_pair(DispatchFormat.DEEPEP_NORMAL, RunnerBackend.DEEP_GEMM),
        permute_context=PermuteContext(
            num_local_experts=4,
            num_experts=4,
            layout=GemmLayout.CONTIG,
            row_alignment=128,
            routed_scaling_factor=2.0,
            quantize=None,
        ),
        runner=runner,
        experts=experts(gemm, padding),
        tail=ReplicatedSharedTail(shared=None, routed_scaling_factor=2.0),
        local_shared=None,
    )


def untapped(stage, value):
    return value


def forward(hidden: torch.Tensor, tap=untapped, padding: int = 0) -> torch.Tensor:
    given = LayerInput(hidden_states=hidden)
    return LoopbackWorld(1).run(
        lambda verbs: layer(verbs, len(hidden), padding).forward(given, tap)
    )[0]


def tokens_for(*chosen: int) -> torch.Tensor:
    """[T, WIDTH] bf16: token t is 10 in column chosen[t] and 0 elsewhere."""
    return 10.0 * torch.nn.functional.one_hot(torch.tensor(chosen), WIDTH).to(torch.bfloat16)


def test_each_token_is_computed_by_its_expert_and_scaled():
    # silu(10) * 10 is 100 in bf16; the factor is 2.
    chosen = (3, 0, 2, 2, 1)
    output = forward(tokens_for(*chosen))
    expected = [2 * 100 * SCALE_OF_EXPERT[expert] for expert in chosen]
    assert [output[t, e].item() for t, e in enumerate(chosen)] == expected


def test_columns_that_are_zero_stay_zero():
    output = forward(tokens_for(3, 0))
    assert output.count_nonzero().item() == 2


def test_the_tap_sees_every_stage_of_a_forward_in_order():
    seen = []

    def tap(stage, value):
        seen.append(stage)
        return value

    forward(tokens_for(0), tap)
    assert seen == [stage for stage in Stage if stage is not Stage.WEIGHTS]


def test_what_the_tap_returns_is_what_the_next_stage_gets():
    def silenced(stage, value):
        return type(value)(output=torch.zeros_like(value.output)) if stage is Stage.GEMM2 else value

    assert forward(tokens_for(0, 1), silenced).count_nonzero().item() == 0


def test_no_tokens_make_no_rows():
    output = forward(torch.zeros(0, WIDTH, dtype=torch.bfloat16))
    assert (output.shape, output.dtype) == ((0, WIDTH), torch.bfloat16)


def test_rows_are_padded_in_front_of_dispatch_and_cut_behind_combine():
    widths = {}

    def tap(stage, value):
        if stage in (Stage.DISPATCH, Stage.GEMM2, Stage.COMBINE):
            rows = {Stage.DISPATCH: "hidden_states", Stage.GEMM2: "output", Stage.COMBINE: "routed"}
            widths[stage] = getattr(value, rows[stage]).shape[1]
        return value

    forward(tokens_for(3, 0), tap, padding=32)
    assert widths == {Stage.DISPATCH: 96, Stage.GEMM2: 96, Stage.COMBINE: 64}


def test_padding_changes_no_bit_of_the_output():
    tokens = tokens_for(3, 0, 2)
    assert torch.equal(forward(tokens, padding=32), forward(tokens))
