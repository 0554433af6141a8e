import pytest

from moe.formats import QuantRecipe
from scenarios.loader import load_scenario
from scenarios.support import running_values, unsupported_reasons

SITU = [
    "model.overrides.hidden_act=situ",
    "model.overrides.activation_situ_beta=4.0",
    "model.overrides.activation_situ_linear_beta=25.0",
]


def reasons(path, *options):
    loaded = load_scenario(path, overrides=options)
    return unsupported_reasons(loaded.scenario, loaded.model)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["moe.recipe=bf16"],
        ["moe.recipe=bf16", "platform=sm90"],
        ["platform=sm90"],
        ["platform=sm120"],
        ["moe.switches={deepep_bf16_dispatch: true, masked_memory_budget_fraction: 0.5}"],
        ["moe.switches={compact_eager: true, max_dispatch_tokens_per_rank: 64}"],
        ["batch.phase=decode"],
        ["batch.tokens=[0, 0]"],
        ["batch.padding=max_len"],
        ["compare=lattice"],
        ["batch.routing.kind=zipf"],
        ["batch.routing.weights=pinned"],
        ["moe.dispatcher=standard", "moe.shared_experts=replicated", "moe.layout=masked"],
        ["moe.redundant_experts=2", "moe.placement=shuffled"],
        ["model.layer=hash_moe"],
        ["model.overrides.scoring_func=softmax"],
        ["model.overrides.hidden_act=swigluoai"],
        SITU,
        ["model.preset=gpt_oss"],
        ["model.preset=kimi_k2"],
        [
            "model.preset=kimi_k3",
            "model.overrides.routed_expert_hidden_size=256",
            "model.overrides.num_experts_per_tok=2",
        ],
        ["model.overrides.n_group=2", "model.overrides.topk_group=2"],
        ["moe.switches.dp_gather_fp8=true", "moe.switches.shared_expert_tp1=true"],
        ["moe.switches={masked_m_cap: true, mask_dp_pad_moe: true, deterministic: true}"],
        ["moe.dispatcher=flashinfer"],
        ["moe.dispatcher=deepep_v2", "moe.switches.deepep_v2_force_max_len=true"],
        ["moe.dispatcher=deepep_v2", "moe.expanded=true", "allow_unsupported=true"],
        ["moe.layout=compact", "moe.runner=deep_gemm", "moe.shared_experts=replicated"],
        ["run.runtime=loopback", "run.device=cpu", "run.backends.transport=loopback"],
        ["run.backends.transport=gloo", "run.backends.gemm=torch", "run.backends.kernels=torch"],
        ["model.overrides.n_shared_experts=2"],
        ["model.overrides.n_shared_experts=0"],
        ["model.overrides.swiglu_limit=null", "model.overrides.norm_topk_prob=false"],
        ["moe.strict_shapes=true", "allow_unsupported=true", "expect=failed"],
        ["run.backends.gemm=my.module:Gemm"],
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_what_runs_has_no_reason_against_it(written, options):
    assert reasons(written(), *options) == []


@pytest.mark.parametrize("recipe", QuantRecipe)
def test_every_recipe_runs(written, recipe):
    assert reasons(written(), f"moe.recipe={recipe}") == []


TOPOLOGIES = {
    "attention tp": ["parallel.attention={dp: 1, tp: 2}", "batch.tokens=[4]"],
    "cp": ["parallel.attention={dp: 1, cp: 2}", "batch.tokens=[4]"],
    "moe tp": ["moe.dispatcher=standard", "moe.recipe=bf16", "parallel.moe={ep: 1, tp: 2}"],
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_that_has_a_glue_runs(written, topology):
    assert reasons(written(), *TOPOLOGIES[topology]) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["run.backends.kernels=my.module:Rows"], "run.backends.kernels 'my.module:Rows' does"),
        (
            ["run.backends.transport=my.module:Verbs"],
            "run.backends.transport 'my.module:Verbs' does not run",
        ),
        (["run.backends.transport=deep_ep"], "run.backends.transport 'deep_ep' does not run"),
        (["model.overrides.hidden_act=gelu"], "deepseek_v4's hidden_act 'gelu' does not run"),
        (["model.overrides.n_shared_experts=3"], "deepseek_v4's n_shared_experts 3 does not run"),
        (["model.overrides.shared_expert_gate=true"], "deepseek_v4's shared_expert_gate True"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_run_is_one_sentence_with_what_does(written, options, sentence):
    (reason,) = reasons(written(), *options)
    assert reason.startswith(sentence)


def test_running_values_are_those_of_the_table():
    assert running_values("run.backends.kernels") == ("auto", "torch", "triton")
