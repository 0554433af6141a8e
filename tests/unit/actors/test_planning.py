"""What a plan derives from a scenario: layouts, wires, alignment, the shared expert's place."""

import pytest

from actors.planning import plan_of
from actors.resolve import resolve
from moe.formats import ActivationKind, GatedActivation, GemmLayout, ScaleFormat, SharedExpertMode

STANDARD = ("moe.dispatcher=standard", "moe.recipe=bf16")
DECODE = "batch.phase=decode"


def test_rows_of_all_groups_and_all_slots_decide_the_alignment(load):
    """Gathered 5 + 3 rows of 6 slots are 48 routes for 4 local experts: 12 rows each."""
    plan = resolve(load(*STANDARD)).plan
    assert plan.row_alignment == 32


def test_padding_rows_decide_the_alignment_too(load):
    """Two slots of 24 rows hold 288 routes for 4 local experts: 72 each, where tokens are 48."""
    tokens = "batch.tokens=[24, 8]"
    assert resolve(load(*STANDARD, tokens)).plan.row_alignment == 64
    assert resolve(load(*STANDARD, tokens, DECODE)).plan.row_alignment == 96


def test_redundant_slots_share_the_rows(load):
    """24 + 24 rows of 6 slots over 4 local experts are 72 each, over 5 local slots 58."""
    tokens = "batch.tokens=[24, 24]"
    assert resolve(load(*STANDARD, tokens)).plan.row_alignment == 96
    assert resolve(load(*STANDARD, tokens, "moe.redundant_experts=2")).plan.row_alignment == 64


@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_an_all_to_all_announces_segments_of_128(load, platform):
    assert resolve(load(f"platform={platform}")).plan.row_alignment == 128


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ((), GemmLayout.CONTIG),
        (STANDARD, GemmLayout.CONTIG),
        ((*STANDARD, "model.overrides.swiglu_limit=null"), GemmLayout.MASKED),
        ((*STANDARD, "moe.layout=masked"), GemmLayout.MASKED),
        ((*STANDARD, "moe.layout=compact"), GemmLayout.CONTIG),
    ],
    ids=["all to all", "clamped", "not clamped", "masked", "compact"],
)
def test_ranks_and_verdict_are_told_the_layout_that_is_chosen(load, settings, layout):
    resolved = resolve(load(*settings))
    assert resolved.plan.gemm_layout is layout
    assert resolved.judged.gemm_layout is layout


BF16_WIRE = "moe.switches.deepep_bf16_dispatch=true"
DISPATCHER = "moe.dispatcher="


@pytest.mark.parametrize(
    ("settings", "bf16"),
    [
        ((), False),
        ((BF16_WIRE,), True),
        ((f"{DISPATCHER}deepep_ll", BF16_WIRE), True),
        ((f"{DISPATCHER}nixl", DECODE, BF16_WIRE), True),
        ((f"{DISPATCHER}nixl", DECODE), False),
        ((f"{DISPATCHER}deepep_v2", BF16_WIRE), False),
        ((f"{DISPATCHER}flashinfer",), True),
        (STANDARD, True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_either_the_wire_is_bf16_or_the_dispatcher_quantises(load, settings, bf16):
    assert resolve(load(*settings)).plan.bf16_wire is bf16


ONE_GROUP = ("parallel.attention={dp: 1, tp: 2}", "batch.tokens=[8]")
TP1 = "moe.switches.shared_expert_tp1=true"
LOCAL = "moe.switches.dp_shared_expert_local=true"


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ((), SharedExpertMode.REPLICATED),
        (STANDARD, SharedExpertMode.TP_SHARDED),
        ((*STANDARD, TP1), SharedExpertMode.REPLICATED),
        ((*STANDARD, TP1, LOCAL), SharedExpertMode.LOCAL),
        ((*STANDARD, TP1, LOCAL, *ONE_GROUP), SharedExpertMode.REPLICATED),
        ((*STANDARD, "moe.shared_experts=local"), SharedExpertMode.LOCAL),
        ((*STANDARD, "model.overrides.n_shared_experts=0"), None),
        (("model.overrides.n_shared_experts=0",), None),
    ],
    ids=[
        "all to all",
        "standard",
        "tp1",
        "tp1, local",
        "tp1, local, one group",
        "asked for",
        "none",
        "none, all to all",
    ],
)
def test_the_shared_expert_stands_where_dispatcher_and_switches_put_it(load, settings, mode):
    assert resolve(load(*settings)).plan.shared is mode


def test_a_shuffled_placement_is_drawn_from_the_scenarios_seed(load):
    assert resolve(load()).plan.shuffled_by is None
    assert resolve(load("moe.placement=shuffled")).plan.shuffled_by == 7


def test_the_verdict_knows_what_every_physical_slot_holds(load):
    judged = resolve(load("moe.redundant_experts=2")).judged
    assert (judged.slots_per_rank, len(judged.slot_experts)) == (5, 10)
    assert set(judged.slot_experts) == set(range(8))


@pytest.mark.parametrize(
    ("dispatcher", "in_tail"), [("standard", 1.0), ("flashinfer", 1.0), ("deepep_normal", 1.5)]
)
def test_the_factor_is_the_tails_where_no_weighted_sum_has_it(load, dispatcher, in_tail):
    plan = resolve(load(f"moe.dispatcher={dispatcher}", "moe.shared_experts=replicated")).plan
    assert (plan.routed_scaling_factor, plan.tail_scaling_factor) == (1.5, in_tail)


SM120 = (
    "platform=sm120",
    "moe.dispatcher=standard",
    "moe.shared_experts=replicated",
    "model.overrides.moe_intermediate_size=256",
    "parallel.moe={ep: 1, tp: 2}",
)


@pytest.mark.parametrize(
    ("settings", "wide"),
    [
        ((*SM120, "batch.tokens=[1000, 24]"), True),
        ((*SM120, "batch.tokens=[1000, 23]"), False),
        ((*SM120, "batch.tokens=[1000, 24]", "moe.recipe=bf16"), False),
        ((*SM120, "batch.tokens=[1000, 24]", "platform=sm100"), False),
        ((*SM120, "batch.tokens=[1000, 24]", "parallel.moe={ep: 2, tp: 1}"), False),
    ],
    ids=["1024 rows", "1023 rows", "bf16", "sm100", "experts spread"],
)
def test_sm120_has_a_path_of_its_own_for_many_rows_and_whole_experts(load, settings, wide):
    resolved = resolve(load(*settings))
    assert (resolved.plan.wide_segments, resolved.judged.wide_segments) == (wide, wide)
    assert not wide or resolved.plan.row_alignment == 128


MXFP8 = "moe.recipe=mxfp8"
LOW_LATENCY = ("moe.dispatcher=deepep_ll", DECODE)
SITU = (
    "model.overrides.hidden_act=situ",
    "model.overrides.activation_situ_beta=4.0",
    "model.overrides.activation_situ_linear_beta=25.0",
)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ((), (128, 128, 128)),
        (("moe.recipe=mxfp4_w4a8",), (128, 128, 128)),
        ((MXFP8,), (128, 32, 32)),
        ((MXFP8, BF16_WIRE), (32, 32, 32)),
        ((MXFP8, "moe.dispatcher=standard"), (32, 32, 32)),
        ((MXFP8, "moe.dispatcher=deepep_v2"), (32, 32, 32)),
        ((MXFP8, *LOW_LATENCY), (128, 32, 32)),
        ((MXFP8, *LOW_LATENCY, *SITU), (128, 128, 32)),
    ],
    ids=str,
)
def test_scales_cover_the_columns_that_wire_and_kernels_know(load, settings, groups):
    plan = resolve(load(*settings)).plan
    assert (plan.input_group, plan.middle_group, plan.dense_group) == groups


@pytest.mark.parametrize(
    ("settings", "wire", "gemm"),
    [
        (LOW_LATENCY, ScaleFormat.UE8M0, ScaleFormat.UE8M0),
        ((*LOW_LATENCY, "platform=sm90"), ScaleFormat.FP32, ScaleFormat.FP32),
        ((*LOW_LATENCY, "platform=sm120"), ScaleFormat.FP32, ScaleFormat.UE8M0),
        (("platform=sm120",), ScaleFormat.UE8M0, ScaleFormat.UE8M0),
        ((*LOW_LATENCY, "platform=sm120", "moe.recipe=bf16"), ScaleFormat.NONE, ScaleFormat.NONE),
    ],
    ids=str,
)
def test_sm120s_low_latency_wire_alone_has_other_scales_than_its_gemms(load, settings, wire, gemm):
    plan = resolve(load(*settings)).plan
    assert (plan.wire_format, plan.scale_format) == (wire, gemm)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ((), GatedActivation(limit=10.0)),
        (
            ("moe.switches.silu_mul_keep_fp32=true", "moe.dispatcher=deepep_v2", MXFP8),
            GatedActivation(limit=10.0, keeps_fp32=True),
        ),
        (SITU, GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)),
    ],
    ids=["the model's", "kept in fp32", "situ"],
)
def test_ranks_and_verdict_are_told_what_lies_between_the_gemms(load, settings, activation):
    resolved = resolve(load(*settings))
    assert resolved.plan.activation == resolved.judged.activation == activation


def test_experts_that_are_not_padded_are_as_wide_as_their_rows(load):
    resolved = resolve(load())
    assert resolved.plan.expert_hidden_size == resolved.judged.expert_hidden_size == 256


def test_one_layer_dealt_out_otherwise_is_the_same_layer(load):
    one, dealt = (plan_of(load(f"batch.tokens={tokens}")) for tokens in ("[5, 3]", "[0, 1]"))
    assert one.layer_fingerprint() == dealt.layer_fingerprint()
    assert one.fingerprint() != dealt.fingerprint()


@pytest.mark.parametrize("other", ["inputs.seed=8", "moe.recipe=bf16"])
def test_other_weights_are_another_layer(load, other):
    plans = [plan_of(load()), plan_of(load(other))]
    assert plans[0].layer_fingerprint() != plans[1].layer_fingerprint()
