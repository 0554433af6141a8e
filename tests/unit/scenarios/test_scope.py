"""Who names what is left out on purpose is told so, and why."""

import pytest

from moe.formats import DispatchFormat, Platform, QuantRecipe, RunnerBackend
from scenarios.errors import ScenarioError
from scenarios.loader import load_scenario
from scenarios.schema import SwitchesSpec
from scenarios.scope import NO_SWITCH, OUT_OF_SCOPE, left_out

ROWS = (*OUT_OF_SCOPE, *NO_SWITCH)


def problem_of(written, *options):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(), overrides=options)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "moe.dispatcher=pplx",
            "pplx is out of scope here: mori, pplx: dispatchers without a DeepGEMM permute",
        ),
        (
            "moe.dispatcher=megamoe",
            "megamoe is out of scope here: dispatch, GEMMs and combine in one kernel",
        ),
        ("moe.dispatcher=ascend_fuseep", "ascend_fuseep is out of scope here: MUSA, HIP, NPU: oth"),
        ("moe.runner=triton", "triton is out of scope here: runners other than DeepGEMM's: kernel"),
        ("moe.recipe=nvfp4", "nvfp4 is out of scope here: fp4 x fp4: the DeepGEMM runner's activa"),
        ("run.device=npu", "npu is out of scope here: MUSA, HIP, NPU: other vendors' layouts and"),
        (
            "moe.switches.no_combine=true",
            "unknown key: no_combine is out of scope here: deepep_v2 with `no_combine`: hands over",
        ),
        ("moe.no_combine=true", "unknown key: no_combine is out of scope here"),
        ("model.lora=true", "unknown key: lora is out of scope here: LoRA: another formula"),
        (
            "moe.switches.SGLANG_DSV4_FP4_DEQUANT=true",
            "unknown key: SGLANG_DSV4_FP4_DEQUANT is no switch here: `moe.recipe: mxfp4_as_fp8` sa",
        ),
        ("moe.switches.moe_quant_once=true", "unknown key: moe_quant_once is no switch here: SGLA"),
    ],
)
def test_what_is_out_of_scope_says_so_and_why(written, option, message):
    assert problem_of(written, option).message.startswith(message)


def test_what_is_allowed_instead_is_listed(written):
    message = problem_of(written, "moe.dispatcher=mori").message
    assert message.endswith(
        "; allowed: standard, flashinfer, deepep_normal, deepep_ll, deepep_v2, mooncake, nixl"
    )


def test_a_misspelt_name_still_gets_its_nearest_match(written):
    assert "did you mean 'deepep_ll'?" in problem_of(written, "moe.dispatcher=deepep-ll").message


def test_nothing_that_runs_is_called_out_of_scope():
    names = [*DispatchFormat, *QuantRecipe, *Platform, *RunnerBackend, *SwitchesSpec.model_fields]
    assert [name for name in names if left_out(name)] == []


def test_no_word_stands_for_two_things():
    words = [word for row in ROWS for word in row.words]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("value", [None, 3, True, ["pplx"], {"pplx": 1}], ids=str)
def test_a_value_that_is_no_name_is_nothing(value):
    assert left_out(value) is None
