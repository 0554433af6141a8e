"""Who writes another name of a value or a switch is told the one that it has here."""

import json

import pytest
from pydantic import TypeAdapter

from scenarios.aliases import ALIASES, meant_switch, meant_values
from scenarios.errors import ScenarioError
from scenarios.loader import load_scenario
from scenarios.schema import Scenario, SwitchesSpec


def message_of(written, option):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(), overrides=[option])
    (problem,) = caught.value.problems
    return problem.message


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("platform=h100", "'sm90'"),
        ("platform=H200", "'sm90'"),
        ("platform=Hopper", "'sm90'"),
        ("platform=SM90", "'sm90'"),
        ("platform=b200", "'sm100'"),
        ("platform=GB200", "'sm100'"),
        ("platform=blackwell", "'sm100'"),
        ("platform=rtx", "'sm120'"),
        ("platform=RTX PRO 6000", "'sm120'"),
        ("platform=rtx5090", "'sm120'"),
        ("moe.dispatcher=deepep", "'deepep_normal' or 'deepep_ll'"),
        ("moe.dispatcher=DEEPEP_LL", "'deepep_ll'"),
        ("moe.recipe=fp8", "'fp8_block128'"),
        ("batch.phase=prefill", "'extend'"),
        ("moe.layout=contiguous", "'compact'"),
        ("moe.layout=contig", "'compact'"),
    ],
)
def test_a_value_by_another_name_is_asked_back(written, option, meant):
    assert message_of(written, option).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("key", "switch"),
    [
        ("moe.switches.SGLANG_OPT_DG_COMPACT_EAGER", "compact_eager"),
        ("moe.SGLANG_ENABLE_DP_GATHER_FP8", "dp_gather_fp8"),
        ("SGLANG_DEEPEP_BF16_DISPATCH", "deepep_bf16_dispatch"),
        ("moe.switches.sglang_dp_use_gatherv", "dp_use_gatherv"),
        (
            "moe.switches.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            "max_dispatch_tokens_per_rank",
        ),
        (
            "moe.switches.SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            "max_dispatch_tokens_per_rank",
        ),
        ("moe.switches.enable_deterministic_inference", "deterministic"),
    ],
)
def test_a_switch_by_its_upstream_name_is_asked_back(written, key, switch):
    message = message_of(written, f"{key}=true")
    assert message == f"unknown key; did you mean 'moe.switches.{switch}'?"


# The other one is an entry of a model's registry, under the same name here and upstream.
OF_THE_SERVER = [name for name in SwitchesSpec.model_fields if name != "silu_mul_keep_fp32"]


@pytest.mark.parametrize("switch", OF_THE_SERVER)
def test_every_switch_of_a_server_is_found_by_the_first_name_of_its_docstring(switch):
    name = SwitchesSpec.model_fields[switch].description.split(":")[0].split(",")[0]
    assert meant_switch(name) == f"moe.switches.{switch}"


@pytest.mark.parametrize(
    ("key", "value"),
    [(alias.key, value) for alias in ALIASES for value in alias.meant],
)
def test_what_an_alias_stands_for_is_allowed_at_its_key(key, value):
    section = Scenario
    *parents, last = key.split(".")
    for name in parents:
        section = section.model_fields[name].annotation
    assert value in json.dumps(TypeAdapter(section.model_fields[last].annotation).json_schema())


def test_a_name_counts_at_its_own_key_alone():
    assert meant_values(("moe", "recipe"), "h100", ["bf16"]) == ()


@pytest.mark.parametrize("value", [None, 3, True, ["h100"]], ids=str)
def test_a_value_that_is_no_name_stands_for_nothing(value):
    assert meant_values(("platform",), value, ["sm90"]) == ()


def test_a_variable_that_is_no_switch_stands_for_none():
    assert meant_switch("SGLANG_DSV4_FP4_DEQUANT") is None
