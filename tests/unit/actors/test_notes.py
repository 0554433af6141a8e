"""Notes of a result: where upstream differs, and which switches changed nothing."""

import pytest

from actors.notes import idle_switches, notes_of
from actors.resolve import resolve

STANDARD = ("moe.dispatcher=standard", "moe.shared_experts=replicated")
NO_CLAMP = "model.overrides.swiglu_limit=null"
DECODE = "batch.phase=decode"
BF16 = "moe.recipe=bf16"
LL = ("moe.dispatcher=deepep_ll", DECODE)
SM120 = "platform=sm120"


def idle(load, switch, *settings, value="true"):
    loaded = load(f"moe.switches.{switch}={value}", *settings)
    return idle_switches(loaded, resolve(loaded).plan)


ACTING = [
    ("compact_eager", "true", (*STANDARD, NO_CLAMP)),
    ("masked_memory_budget_fraction", "1.0e-6", (*STANDARD, NO_CLAMP)),
    ("masked_m_cap", "true", (*STANDARD, NO_CLAMP)),
    ("masked_m_cap", "true", ("moe.dispatcher=flashinfer", NO_CLAMP)),
    ("mask_dp_pad_moe", "true", (*STANDARD, DECODE)),
    (
        "dp_use_reduce_scatter",
        "true",
        (*STANDARD, "batch.padding=max_len", "parallel.moe.ep=1", "parallel.moe.tp=2", BF16),
    ),
    ("dp_gather_fp8", "true", STANDARD),
    ("shared_expert_tp1", "true", ("moe.dispatcher=standard", BF16)),
    (
        "dp_shared_expert_local",
        "true",
        ("moe.dispatcher=standard", BF16, "moe.switches.shared_expert_tp1=true"),
    ),
    ("deepep_bf16_dispatch", "true", ()),
    ("deepep_bf16_dispatch", "true", LL),
    ("deepep_v2_force_max_len", "true", ("moe.dispatcher=deepep_v2",)),
    ("max_dispatch_tokens_per_rank", "64", LL),
    ("max_dispatch_tokens_per_rank", "64", ("moe.dispatcher=flashinfer", DECODE)),
    ("deterministic", "true", ()),
    ("deterministic", "true", STANDARD),
]

IDLE = [
    ("compact_eager", "true", ()),
    ("compact_eager", "true", STANDARD),
    ("masked_memory_budget_fraction", "0.5", (*STANDARD, NO_CLAMP)),
    ("masked_m_cap", "true", ()),
    ("masked_m_cap", "true", STANDARD),
    ("masked_m_cap", "true", LL),
    ("mask_dp_pad_moe", "true", STANDARD),
    ("mask_dp_pad_moe", "true", (DECODE,)),
    ("dp_use_gatherv", "true", ()),
    ("dp_gather_fp8", "true", ()),
    ("dp_gather_fp8", "true", (*STANDARD, "batch.padding=max_len")),
    ("shared_expert_tp1", "true", ()),
    ("dp_shared_expert_local", "true", (*STANDARD,)),
    ("deepep_bf16_dispatch", "true", STANDARD),
    ("deepep_bf16_dispatch", "true", (BF16,)),
    ("deepep_bf16_dispatch", "true", ("moe.dispatcher=deepep_v2",)),
    ("deepep_v2_force_max_len", "true", ()),
    ("max_dispatch_tokens_per_rank", "64", ()),
    ("max_dispatch_tokens_per_rank", "64", ("moe.dispatcher=flashinfer",)),
    ("deterministic", "true", (*STANDARD, NO_CLAMP)),
    ("deterministic", "true", (*STANDARD, BF16)),
    ("deterministic", "true", LL),
]


@pytest.mark.parametrize(("switch", "value", "settings"), ACTING, ids=str)
def test_a_switch_that_acts_is_not_mentioned(load, switch, value, settings):
    assert idle(load, switch, *settings, value=value) == []


@pytest.mark.parametrize(("switch", "value", "settings"), IDLE, ids=str)
def test_a_switch_that_changes_nothing_is_a_note(load, switch, value, settings):
    assert idle(load, switch, *settings, value=value) == [
        f"moe.switches.{switch} changes nothing here"
    ]


def test_two_idle_switches_are_two_notes(load):
    notes = idle(load, "compact_eager", "moe.switches.masked_m_cap=true")
    assert notes == [
        f"moe.switches.{name} changes nothing here" for name in ("compact_eager", "masked_m_cap")
    ]


def test_switches_at_their_defaults_are_not_mentioned(load):
    assert idle_switches(load(), resolve(load()).plan) == []


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ((), []),
        ((SM120,), ["as SGLang 0.5.21 does on SM121; on SM120 itself"]),
        ((SM120, BF16), ["bf16 experts of SGLang"]),
        ((SM120, BF16, NO_CLAMP), []),
        ((SM120, *LL), ["SM121", "the wire of deepep_ll has fp32 scales on sm120"]),
        ((SM120, *LL, "moe.switches.deepep_bf16_dispatch=true"), ["SM121"]),
        (("platform=sm90", *LL), []),
        (("platform=sm100", *LL), []),
        ((BF16,), ["experts clamp at 10, as the model says"]),
    ],
    ids=str,
)
def test_what_upstream_does_otherwise_is_noted_where_it_matters(load, settings, pieces):
    notes = notes_of(load(*settings))
    assert len(notes) == len(pieces)
    assert all(piece in note for piece, note in zip(pieces, notes, strict=True))


OAI = ("model.overrides.hidden_act=swigluoai",)
SITU = (
    "model.overrides.hidden_act=situ",
    "model.overrides.activation_situ_beta=4.0",
    "model.overrides.activation_situ_linear_beta=25.0",
)
PLAIN_BF16 = "in bf16 experts SGLang 0.5.21 computes a plain silu(g) * u"
PLAIN_COMPACT = "in the compact layout SGLang 0.5.21 computes a plain silu(g) * u"
LATE_SCALES = "1.44 times too large on average and 2 times at most, the relative error is 0.52"


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ((*OAI, BF16), [f"experts compute oai_swiglu, as the model says; {PLAIN_BF16}"]),
        ((*SITU, BF16), [f"experts compute situ, as the model says; {PLAIN_BF16}"]),
        ((*OAI,), [f"experts compute oai_swiglu, as the model says; {PLAIN_COMPACT}"]),
        ((*OAI, "platform=sm90"), [PLAIN_COMPACT]),
        ((*OAI, *LL), []),
        ((*SITU,), [LATE_SCALES]),
        ((*SITU, "platform=sm90"), []),
        ((*SITU, *LL), []),
        ((), []),
    ],
    ids=str,
)
def test_what_upstream_computes_between_the_gemms_is_noted_where_it_differs(load, settings, pieces):
    notes = notes_of(load(*settings))
    assert len(notes) == len(pieces)
    assert all(piece in note for piece, note in zip(pieces, notes, strict=True))


FEW_EXPERTS = "model.overrides={n_routed_experts: 16}"


@pytest.mark.parametrize(
    ("preset", "pieces"),
    [
        ("kimi_k2", []),
        ("gpt_oss", ["the biases of the model's router and experts are left out", PLAIN_BF16]),
        ("kimi_k3", ["latent width 3584 here; the projections from and to the", PLAIN_BF16]),
    ],
)
def test_what_of_a_published_layer_is_left_out_is_noted(load, preset, pieces):
    notes = notes_of(load(f"model.preset={preset}", FEW_EXPERTS, BF16))
    assert len(notes) == len(pieces)
    assert all(piece in note for piece, note in zip(pieces, notes, strict=True))


def test_padded_experts_are_noted_with_both_sizes(load):
    notes = notes_of(load("model.preset=gpt_oss", FEW_EXPERTS, "moe.recipe=mxfp4_w4a8"))
    assert any("padded with zeros from 2880 x 2880 to 3072 x 3072" in note for note in notes)


EP16 = (
    "parallel.world_size=16",
    "parallel.attention.dp=16",
    "parallel.moe.ep=16",
    "model.overrides.n_routed_experts=16",
    f"batch.tokens={[1] * 16}",
)


@pytest.mark.parametrize(
    ("dispatcher", "noted"),
    [
        ("deepep_normal", True),
        ("deepep_v2", True),
        ("deepep_ll", False),
        ("flashinfer", False),
        ("standard", False),
    ],
)
def test_sums_between_nodes_are_noted_where_the_dispatcher_adds_in_steps(load, dispatcher, noted):
    notes = notes_of(load(*EP16, f"moe.dispatcher={dispatcher}", "moe.recipe=bf16", NO_CLAMP))
    assert ["between nodes DeepEP adds in steps" in note for note in notes] == [True] * noted
