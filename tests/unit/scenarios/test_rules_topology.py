"""Topologies that no flow is defined for are refused with the rule and its source."""

import re

import pytest

from scenarios.errors import ScenarioError
from scenarios.loader import load_scenario

STANDARD = "moe.dispatcher=standard"
WHOLE_SHARED = "moe.shared_experts=replicated"
FOUR = "parallel.world_size=4"
GLUE = "SGLang 0.5.21, layers/dp_attention.py; models/deepseek_v4.py::_run_moe_ffn_dp_sync"
CP = "SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync"

# Settings -> key at fault, what is wrong, where upstream says so.
REFUSED = {
    "attention degrees": (
        (FOUR, "parallel.moe.ep=4"),
        "parallel.attention: attention dp(2) * tp(1) * cp(1) = 2 != world_size(4)",
        "SGLang 0.5.21, layers/dp_attention.py",
    ),
    "moe degrees": (
        ("parallel.moe={ep: 2, tp: 2}", STANDARD, "moe.recipe=bf16"),
        "parallel.moe: moe ep(2) * tp(2) = 4 != world_size(2)",
        "SGLang 0.5.21, distributed/parallel_state.py",
    ),
    "flashinfer over shards of experts": (
        ("moe.dispatcher=flashinfer", "moe.recipe=bf16", "parallel.moe={ep: 1, tp: 2}"),
        "parallel.moe.tp: flashinfer moves tokens to whole experts: moe tp must be 1, is 2",
        "SGLang 0.5.21, server_args.py (an a2a backend sets ep_size = tp_size)",
    ),
    "cp with a dispatcher that has none": (
        ("parallel.attention={dp: 1, cp: 2}", "batch.tokens=[8]", "moe.dispatcher=deepep_v2"),
        "parallel.attention.cp: deepep_v2 has no context parallelism: cp must be 1, is 2",
        CP,
    ),
    "cp beside dp": (
        (
            FOUR,
            STANDARD,
            "moe.recipe=bf16",
            "parallel.attention={dp: 2, cp: 2}",
            "parallel.moe.ep=4",
        ),
        "parallel.attention.cp: cp(2) with dispatcher standard needs dp = tp = 1, has dp(2) tp(1)",
        CP,
    ),
    "a split quantisation block": (
        (STANDARD, WHOLE_SHARED, "parallel.moe={ep: 1, tp: 2}"),
        "split: moe_intermediate_size(128) / moe tp(2) = 64",
        "SGLang 0.5.21, layers/quantization/fp8.py::create_weights",
    ),
    "a split block of the shared expert": (
        (STANDARD,),
        "moe.shared_experts: shared_intermediate_size(128) / world_size(2) = 64",
        "SGLang 0.5.21, layers/quantization/fp8.py::create_weights (block sharding)",
    ),
    "a shared expert with a rest": (
        (
            STANDARD,
            "moe.recipe=bf16",
            "parallel={world_size: 3, attention: {dp: 3}, moe: {ep: 3}}",
            "batch.tokens=[1, 2, 3]",
            "model.overrides.n_routed_experts=9",
        ),
        "shared_intermediate_size(128) / world_size(3) leaves a rest; use shared_experts: replic",
        "SGLang 0.5.21, layers/quantization/fp8.py::create_weights (block sharding)",
    ),
    "more ranks than experts": (
        ("model.overrides.n_routed_experts=1", "model.overrides.num_experts_per_tok=1"),
        "parallel.moe.ep: 2 expert-parallel ranks for 1 experts: some would hold none",
        "SGLang 0.5.21, layers/moe/fused_moe_triton/layer.py",
    ),
    "a scatter where every rank keeps every row": (
        (
            STANDARD,
            WHOLE_SHARED,
            "parallel.attention={dp: 1, tp: 2}",
            "batch.tokens=[8]",
            "moe.reduce=reduce_scatter",
        ),
        "moe.reduce: reduce reduce_scatter: every rank keeps every row, so nothing is scattered",
        GLUE,
    ),
    "an all-reduce behind a dp gather": (
        (STANDARD, WHOLE_SHARED, "moe.reduce=all_reduce"),
        "moe.reduce: reduce all_reduce: behind a DP gather the tail all-reduces",
        GLUE,
    ),
    "a reduce-scatter of two ranks a group": (
        (
            FOUR,
            STANDARD,
            WHOLE_SHARED,
            "parallel.attention={dp: 2, tp: 2}",
            "parallel.moe.ep=4",
            "moe.reduce=reduce_scatter_v",
        ),
        "moe.reduce: reduce reduce_scatter_v: behind a DP gather the tail all-reduces",
        GLUE,
    ),
    "padding of a single group": (
        ("parallel.attention={dp: 1, tp: 2}", "batch.tokens=[8]", "batch.padding=max_len"),
        "padding max_len: slots are padded between attention-DP groups, dp is 1",
        "SGLang 0.5.21, layers/dp_attention.py::DpPaddingMode",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_flow_is_refused_with_its_rule_and_source(written, case):
    settings, problem, source = REFUSED[case]
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(), overrides=settings)
    text = " ".join(str(caught.value).split())
    assert "1 problem(s)" in text
    assert problem in text
    assert re.search(rf"\[semantic rule [a-z0-9_]+: {re.escape(source)}\]", text)


def test_a_glue_is_asked_for_only_once_its_degrees_are_right(written):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(), overrides=(FOUR, STANDARD, "moe.reduce=all_reduce"))
    assert "moe.reduce" not in str(caught.value)
