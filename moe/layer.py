"""One MoE layer on one rank: the stages, in order."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch import Dispatcher
from moe.formats import Stage
from moe.grouped_gemm import matmul_nt
from moe.permute import PermutePair
from moe.placement import ExpertPlacement
from moe.routing import RoutingRule, select_experts
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import LayerRows, TopKOutput
from moe.tail import ReplicatedSharedTail
from moe.tap import Tap


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Router:
    """Gate and top-k of one layer.

    gate_weight      [E, H]  bf16
    correction_bias  [E]     fp32, or None
    """

    gate_weight: Tensor
    correction_bias: Tensor | None
    rule: RoutingRule

    def __call__(self, hidden_states: Tensor) -> TopKOutput:
        """Logits in fp32 from bf16 operands, then the routes."""
        logits = matmul_nt(hidden_states.to(torch.float32), self.gate_weight.to(torch.float32))
        return select_experts(logits, self.correction_bias, self.rule)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MoeLayer:
    """Route, dispatch, pre-permute, experts, post-permute, combine, tail.

    glue_in, glue_out  bring the rows the layer needs to this rank, and the owned ones back
    """

    glue_in: Callable[[Tensor], Tensor]
    route: Router
    placement: ExpertPlacement
    dispatcher: Dispatcher
    permute: PermutePair
    runner: RunnerCore
    experts: LoadedExperts
    tail: ReplicatedSharedTail
    glue_out: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, tap: Tap) -> Tensor:
        """[T, H] bf16 rows of this rank through the layer."""
        x = tap(Stage.GLUE_IN, LayerRows(hidden_states=self.glue_in(hidden_states))).hidden_states
        topk = tap(Stage.ROUTE, self.route(x))
        ids = self.placement.to_physical(topk.topk_ids)
        sent = tap(Stage.DISPATCH, self.dispatcher.dispatch(x, ids, topk.topk_weights))
        grouped = tap(Stage.PRE_PERMUTE, self.permute.pre(sent))
        expert_output = self.runner.run(grouped.rows, self.experts, tap)
        partial = tap(Stage.POST_PERMUTE, self.permute.post(expert_output, grouped.restore))
        combined = tap(Stage.COMBINE, self.dispatcher.combine(partial, sent.handle))
        finished = tap(Stage.TAIL, self.tail.finish(x, combined))
        return tap(
            Stage.GLUE_OUT, LayerRows(hidden_states=self.glue_out(finished.output))
        ).hidden_states
