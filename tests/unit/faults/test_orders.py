"""Sums in another order: which forwards have them, and that no more than the order changes."""

from types import SimpleNamespace

import pytest
import torch

from moe.faults.orders import sum_order_varies, tile_depends_on_batch
from moe.formats import ScoringFunc, Stage
from moe.grouped_gemm import matmul_nt
from moe.routing import RoutingRule, select_experts
from moe.stages import GlueInOutput
from tests.unit.faults.values import context

ROWS = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
GATE = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
RULE = RoutingRule(top_k=2, scoring_func=ScoringFunc.SIGMOID, renormalize=True)
SEEN = {
    Stage.GLUE_IN: GlueInOutput(own=ROWS, hidden_states=ROWS),
    Stage.WEIGHTS: SimpleNamespace(gate_weight=GATE),
}


def routed():
    return select_experts(matmul_nt(ROWS.float(), GATE.float()), None, RULE)


def test_the_first_forward_adds_as_it_should():
    topk = routed()
    assert sum_order_varies(topk, context(seen=SEEN)) is topk


def test_later_forwards_have_other_bits_and_the_same_experts():
    topk = routed()
    other = sum_order_varies(topk, context(seen=SEEN, earlier={Stage.ROUTE: topk}))
    assert not torch.equal(other.logits, topk.logits)
    assert torch.equal(other.topk_ids, topk.topk_ids)
    assert (other.logits - topk.logits).abs().max() < 256 * 2.0**-23 * ROWS.float().norm(
        dim=1
    ).max()


@pytest.mark.parametrize(("rows", "changes"), [(4, False), (5, True)])
def test_the_other_kernel_takes_up_to_so_many_rows(rows, changes):
    topk = routed()
    other = tile_depends_on_batch(topk, context(seen=SEEN, rows=rows))
    assert torch.equal(other.logits, topk.logits) is not changes


def test_weights_that_no_rule_gives_are_left_alone():
    topk = routed()
    topk.topk_weights[:] = 0.3
    assert tile_depends_on_batch(topk, context(seen=SEEN, rows=16)) is topk
