"""Faults of the order of sums: each sum is right, and another one next time or in another batch."""

from dataclasses import replace
from typing import Final

import torch

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.routing import rule_behind
from moe.formats import Stage
from moe.grouped_gemm import matmul_nt
from moe.routing import weights_at
from moe.stages import TopKOutput


def sum_order_varies(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """From the second forward on the router adds its columns from behind, as atomics may."""
    return _routed_by_other_sums(topk, context) if context.earlier else topk


def tile_depends_on_batch(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Up to ``rows`` rows go to another router kernel, which adds their columns from behind."""
    is_small = len(topk.logits) <= int(context.params["rows"])
    return _routed_by_other_sums(topk, context) if is_small else topk


def _routed_by_other_sums(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Logits whose columns were added in descending order, with the weights that follow.

    The chosen experts stay; so does everything where a tap cannot tell how weights were made.
    """
    rule = rule_behind(topk)
    if rule is None:
        return topk
    rows, gate = context.seen[Stage.GLUE_IN].hidden_states, context.seen[Stage.WEIGHTS].gate_weight
    logits = matmul_nt(rows.to(torch.float32).flip(1), gate.to(torch.float32).flip(1))
    return replace(topk, logits=logits, topk_weights=weights_at(logits, topk.topk_ids, rule))


ORDER_FAULTS: Final = (
    value_fault(
        Stage.ROUTE,
        sum_order_varies,
        "the router's sums in another order from the second forward on",
        "sgl-project/sglang#10785",
    ),
    value_fault(
        Stage.ROUTE,
        tile_depends_on_batch,
        "the router's sums in another order for few rows",
        "vllm-project/vllm#57016",
        rows=16,
    ),
)
