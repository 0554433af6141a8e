"""One MoE layer on one rank: the stages, in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.batch import LayerInput
from moe.dispatch import Dispatcher
from moe.formats import Stage
from moe.glue import Glue
from moe.grouped_gemm import matmul_nt
from moe.padding import pad_columns
from moe.permute import PermuteContext, PermutePair
from moe.placement import ExpertPlacement
from moe.routing import RoutingRule, select_experts, weights_at
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import CombineOutput, GlueInOutput, GlueOutOutput, LogicalIds, TopKOutput
from moe.tail import SharedExpert, Tail
from moe.tap import Tap


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Router:
    """Gate and top-k of one layer.

    gate_weight      [E, H]  bf16
    correction_bias  [E]     fp32, or None
    tid2eid          [V, K]  int32 experts of each vocabulary id, for a hashed layer; or None
    is_unrouted      [T]     bool  padding rows that keep out of routing; None: every row is routed
    """

    gate_weight: Tensor
    correction_bias: Tensor | None
    tid2eid: Tensor | None
    rule: RoutingRule
    is_unrouted: Tensor | None

    def __call__(self, rows: GlueInOutput, given: LayerInput) -> TopKOutput:
        """Logits in fp32 from bf16 operands, then the routes, or those pinned from outside."""
        x = rows.hidden_states.to(torch.float32)
        logits = matmul_nt(x, self.gate_weight.to(torch.float32))
        free = select_experts(
            logits,
            self.correction_bias,
            self.rule,
            is_padding=self.is_unrouted,
            input_ids=rows.input_ids,
            tid2eid=self.tid2eid,
        )
        return self._pinned(free, given)

    def _pinned(self, free: TopKOutput, given: LayerInput) -> TopKOutput:
        ids, weights = free.topk_ids, free.topk_weights
        if given.topk_ids is not None:
            ids = LogicalIds(given.topk_ids)
            weights = weights_at(free.logits, ids, self.rule)
        if given.topk_weights is not None:
            weights = given.topk_weights.masked_fill(ids < 0, 0.0)
        return TopKOutput(logits=free.logits, topk_ids=ids, topk_weights=weights)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MoeLayer:
    """Rows together, route, dispatch, permute, experts, and the way back, step by step.

    expert_hidden_size  columns of a row between dispatch and combine, padding included
    glue          brings the rows the layer needs to this rank, and the owned ones back
    local_shared  a shared expert that works on own rows and is added at the very end, or None
    """

    glue: Glue
    route: Router
    placement: ExpertPlacement
    expert_hidden_size: int
    dispatcher: Dispatcher
    permute: PermutePair
    permute_context: PermuteContext
    runner: RunnerCore
    experts: LoadedExperts
    tail: Tail
    local_shared: SharedExpert | None

    def forward(self, given: LayerInput, tap: Tap) -> Tensor:
        """[O, H] bf16 own rows of this rank through the layer."""
        rows = tap(Stage.GLUE_IN, self.glue.enter(given.hidden_states, given.input_ids))
        x = rows.hidden_states
        topk = tap(Stage.ROUTE, self.route(rows, given))
        ids = self.placement.to_physical(topk.topk_ids)
        wide = pad_columns(x, self.expert_hidden_size)
        sent = tap(Stage.DISPATCH, self.dispatcher.dispatch(wide, ids, topk.topk_weights))
        grouped = tap(Stage.PRE_PERMUTE, self.permute.pre(sent, self.permute_context))
        expert_output = self.runner.run(grouped.rows, self.experts, tap)
        partial = tap(
            Stage.POST_PERMUTE,
            self.permute.post(expert_output, grouped.restore, self.permute_context),
        )
        returned = self.dispatcher.combine(partial, sent.handle)
        routed = returned.routed[:, : x.shape[1]]
        combined = tap(Stage.COMBINE, CombineOutput(routed=routed))
        finished = tap(Stage.TAIL, self.tail.finish(x, combined))
        left = tap(Stage.GLUE_OUT, self._leave(finished.output, rows.own))
        return left.hidden_states

    def _leave(self, rows: Tensor, own: Tensor) -> GlueOutOutput:
        """Own rows back; a local shared expert joins them here."""
        returned = self.glue.leave(rows)
        if self.local_shared is None:
            return GlueOutOutput(hidden_states=returned)
        shared = self.local_shared(own)
        total = returned.to(torch.float32) + shared.output.to(torch.float32)
        return GlueOutOutput(
            hidden_states=total.to(torch.bfloat16), returned=returned, shared=shared
        )
