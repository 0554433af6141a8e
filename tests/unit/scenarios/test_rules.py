"""Every rule refuses what breaks it, lets its nearest neighbours pass, and prints its values."""

from types import SimpleNamespace

import pytest

from scenarios.errors import ScenarioError
from scenarios.loader import load_scenario
from scenarios.presets import Preset
from scenarios.rules import MODEL_RULES, SCENARIO_RULES, RuleKind, check_rules
from scenarios.rules.rule import Sized
from tests.unit.scenarios.rule_cases import (
    BROKEN,
    FLASHINFER,
    LL,
    RIGHT_NEIGHBOURS,
    STANDARD,
    V2,
    WHOLE_SHARED,
    WORLD4,
    build,
)

ALL_RULES = {rule.name: rule for rule in (*SCENARIO_RULES, *MODEL_RULES)}


def message_of(rule, scenario, model):
    return rule.check(Sized(scenario, model) if rule in MODEL_RULES else scenario)


def test_every_rule_has_a_case_that_breaks_it():
    assert set(BROKEN) == set(ALL_RULES)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_prints_its_values(right, name):
    changes, piece = BROKEN[name]
    assert piece in message_of(ALL_RULES[name], *build(right, changes))


@pytest.mark.parametrize("name", ALL_RULES)
def test_no_rule_is_broken_by_the_right_scenario(right, name):
    assert message_of(ALL_RULES[name], *build(right, {})) is None


@pytest.mark.parametrize("name", RIGHT_NEIGHBOURS)
def test_a_right_neighbour_passes(right, name):
    assert check_rules(*build(right, RIGHT_NEIGHBOURS[name])).problems == ()


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_reads_only_the_sections_it_declares(right, name):
    scenario, model = build(right, BROKEN[name][0])
    rule = ALL_RULES[name]
    partial = SimpleNamespace(**{section: getattr(scenario, section) for section in rule.reads})
    assert message_of(rule, partial, model) == message_of(rule, scenario, model)


@pytest.mark.parametrize("name", ALL_RULES)
def test_a_rule_points_at_a_key_that_exists(right, name):
    scenario, _ = build(right, {})
    value = scenario
    for key in ALL_RULES[name].field.split("."):
        value = getattr(value, key)
    assert ALL_RULES[name].source


FOUR_SLOTS = {"model.overrides.num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "piece"),
    [
        ("one_rank", FOUR_SLOTS | {"moe.placement": "shuffled"}, "shuffled or redundant slots"),
        ("one_rank", FOUR_SLOTS | {"moe.redundant_experts": 2}, "shuffled or redundant slots"),
        (
            "hot_expert",
            {"model.overrides.num_experts_per_tok": 8},
            "draws 8 experts beside it, there are 7",
        ),
        ("ties", {"model.layer": "hash_moe"}, "a hash layer chooses by table"),
        ("all_negative", {"model.layer": "hash_moe"}, "a hash layer chooses by table"),
        (
            "all_negative",
            {"inputs": {"modes": ["file"], "path": "x.safetensors"}},
            "captured ones have their own",
        ),
        (
            "ties",
            {"model.weights": {"kind": "safetensors", "path": "x.safetensors", "layer": 3}},
            "a checkpoint has its own",
        ),
    ],
    ids=[
        "shuffled",
        "redundant",
        "top-k of all",
        "ties hashed",
        "negative hashed",
        "captured",
        "checkpoint",
    ],
)
def test_a_routing_that_cannot_be_made_is_refused(right, kind, changes, piece):
    broken = check_rules(*build(right, {"batch.routing": {"kind": kind}} | changes)).problems
    assert [rule.name for rule in broken] == ["a_made_routing_fits_the_layer"]
    assert piece in broken[0].message


def test_a_semantic_rule_cannot_be_waived(right):
    changes = {"moe.layout": "masked", "allow_unsupported": True}
    assert [rule.name for rule in check_rules(*build(right, changes)).problems] == [
        "layout_is_the_dispatchers"
    ]


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch.phase": "decode", "moe.expanded": False}],
    ids=["prefill", "decode not expanded"],
)
def test_tokens_of_deepep_v2_in_slabs_mean_nothing_waived_or_not(right, changes):
    changes = V2 | changes | {"moe.layout": "masked", "allow_unsupported": True}
    assert [rule.name for rule in check_rules(*build(right, changes)).problems] == [
        "layout_of_deepep_v2_follows_expansion"
    ]


def test_a_policy_rule_refuses_by_default(right):
    report = check_rules(*build(right, {"moe.recipe": "mxfp8", "platform": "sm120"}))
    assert [rule.kind for rule in report.problems] == [RuleKind.POLICY]


def test_a_policy_refusal_says_how_to_waive_it(right):
    (broken,) = check_rules(*build(right, {"moe.recipe": "mxfp8", "platform": "sm120"})).problems
    assert "mxfp4_w4a8); `allow_unsupported: true` waives this [policy rule " in broken.refusal


def test_a_semantic_refusal_offers_no_waiver(right):
    (broken,) = check_rules(*build(right, {"moe.expanded": True, "batch.phase": "decode"})).problems
    assert broken.refusal == f"{broken.message} [semantic rule {broken.name}: {broken.source}]"


def test_a_waived_policy_rule_becomes_a_note(right):
    changes = {"moe.recipe": "mxfp8", "platform": "sm120", "allow_unsupported": True}
    report = check_rules(*build(right, changes))
    assert report.problems == ()
    assert (
        "fp8_block128, mxfp4_w4a8) [policy rule recipe_has_kernels_on_platform, not enforced here"
        in report.notes[0]
    )


@pytest.mark.parametrize(
    "enforcing",
    [
        {"moe.strict_shapes": True},
        {"run.backends.gemm": "deep_gemm"},
        {"run.backends.transport": "deep_ep"},
    ],
    ids=["strict", "deep_gemm", "deep_ep"],
)
def test_a_kernel_shape_is_refused_with_real_kernels_and_noted_without(right, enforcing):
    wrong = {"moe.recipe": "bf16", "model.overrides.hidden_size": 200}
    emulated = check_rules(*build(right, wrong))
    assert (len(emulated.problems), len(emulated.notes)) == (0, 1)
    real = check_rules(*build(right, wrong | enforcing))
    assert [rule.name for rule in real.problems] == ["ep_gather_width"]


def test_a_kernel_shape_may_be_waived_to_see_what_the_kernel_does_unless_it_is_asked_for(right):
    wrong = {"moe.recipe": "bf16", "model.overrides.hidden_size": 200, "allow_unsupported": True}
    real = {"run.backends.gemm": "deep_gemm"}
    waived = check_rules(*build(right, wrong | real))
    assert (len(waived.problems), len(waived.notes)) == (0, 1)
    strict = check_rules(*build(right, wrong | real | {"moe.strict_shapes": True}))
    assert [rule.name for rule in strict.problems] == ["ep_gather_width"]


def test_slabs_that_the_clamping_kernel_has_not_are_refused_only_where_it_would_run(right):
    """Emulated slabs run; the note says what SGLang would take instead."""
    asked = STANDARD | WHOLE_SHARED | {"moe.layout": "masked"}
    notes = check_rules(*build(right, asked)).notes
    assert any(note.startswith("moe.layout: the clamping masked kernel wants") for note in notes)
    real = check_rules(*build(right, asked | {"moe.strict_shapes": True})).problems
    assert "clamped_rows_may_lie_in_slabs" in {rule.name for rule in real}


@pytest.mark.parametrize(
    ("slabs", "experts", "width", "is_noted"),
    [
        (LL, 512, 2048, False),
        (LL, 514, 4096, True),
        (LL, 64, 256, False),
        (LL, 66, 256, True),
        (STANDARD, 512, 4096, False),
        (STANDARD, 514, 4096, True),
    ],
    ids=["256", "257", "threads", "too few threads", "256 by choice", "257 by choice"],
)
def test_the_clamping_kernel_counts_so_many_experts_of_a_rank(
    right, slabs, experts, width, is_noted
):
    changes = slabs | {
        "model.overrides.n_routed_experts": experts,
        "model.overrides.moe_intermediate_size": width,
    }
    message = message_of(ALL_RULES["clamping_kernel_threads"], *build(right, changes))
    assert bool(message) is is_noted
    assert message is None or f"I = {width}, {experts // 2} experts" in message


def test_kernel_shapes_follow_the_layout_that_auto_takes(right):
    """Without a clamp auto takes slabs, whose scales come in fours: 128 columns are one."""
    auto = STANDARD | WHOLE_SHARED | {"model.overrides.hidden_size": 512}
    strict = auto | {"moe.strict_shapes": True}
    assert check_rules(*build(right, strict)).problems == ()
    slabs = check_rules(*build(right, strict | {"model.overrides.swiglu_limit": None})).problems
    assert [rule.name for rule in slabs] == ["slab_scales_come_in_fours"]


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (LL | {"batch.tokens": [129, 0]}, 128),
        ({"moe.dispatcher": "mooncake", "batch.tokens": [129, 0]}, 128),
        (V2 | {"batch.tokens": [129, 0]}, 128),
        (FLASHINFER | {"batch.phase": "decode", "batch.tokens": [4097, 0]}, 4096),
    ],
    ids=["deepep_ll", "mooncake", "deepep_v2 prefill", "flashinfer decode"],
)
def test_too_many_rows_are_refused_with_the_limit_and_the_switch_that_raises_it(
    right, changes, limit
):
    (broken,) = check_rules(*build(right, changes)).problems
    dispatcher = changes["moe.dispatcher"]
    assert (broken.name, broken.field) == ("rows_fit_the_dispatch_buffer", "batch.tokens")
    assert f"{dispatcher} takes {limit}; moe.switches.max_dispatch" in broken.message


def test_deepep_v2_takes_no_scale_a_tensor(right):
    (broken,) = check_rules(*build(right, V2 | {"moe.recipe": "fp8_per_tensor"})).problems
    assert broken.message.startswith("deepep_v2 rejects fp8_per_tensor")


@pytest.mark.parametrize("top_k", [10, 12, 14, 16, 18, 22])
def test_orders_of_addition_out_of_scope_are_named(right, top_k):
    changes = FLASHINFER | {
        "batch.phase": "decode",
        "model.overrides.num_experts_per_tok": top_k,
        "model.overrides.n_routed_experts": 32,
    }
    (broken,) = check_rules(*build(right, changes)).problems
    assert f"its order for {top_k} is out of scope here" in broken.message


def test_without_a_model_the_other_rules_still_speak(right):
    scenario, _ = build(right, WORLD4)
    assert {rule.field for rule in check_rules(scenario, None).problems} == {
        "parallel.attention",
        "parallel.moe",
    }


def test_unreadable_sections_silence_the_rules_that_read_them(right):
    scenario, model = build(right, WORLD4 | {"moe.layout": "masked"})
    report = check_rules(scenario, model, readable={"moe"})
    assert [rule.name for rule in report.problems] == ["layout_is_the_dispatchers"]


def test_rule_names_are_unique():
    assert len(ALL_RULES) == len(SCENARIO_RULES) + len(MODEL_RULES)


@pytest.mark.parametrize("preset", Preset)
def test_a_preset_as_published_breaks_no_rule(right, preset):
    recipe = "mxfp4_w4a8" if preset is Preset.GPT_OSS else "fp8_block128"
    changes = {"model": {"preset": preset}, "moe.recipe": recipe}
    assert check_rules(*build(right, changes)).problems == ()


def test_groups_of_one_expert_have_no_best_two():
    settings = (
        "model.preset=deepseek_v3",
        "model.overrides={hidden_size: 256, moe_intermediate_size: 128, n_routed_experts: 8, "
        "n_group: 8, topk_group: 8}",
    )
    with pytest.raises(ScenarioError, match=r"best 2; n_group\(8\) leaves it one expert"):
        load_scenario("scenarios/smoke/ep2_dp.yaml", overrides=settings)
