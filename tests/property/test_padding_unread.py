"""Nothing reads padding, nor a tensor after its last declared use: two fills, equal outputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.planning import plan_of
from actors.world import LoopbackRanks
from moe.formats import Stage
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario, load_scenario
from scenarios.support import unsupported_reasons

ROOT = Path(__file__).parents[2] / "scenarios"
DISPATCH = sorted(ROOT.glob("dispatch/*.yaml"))
FILES = [*sorted(ROOT.glob("topologies/*.yaml")), *DISPATCH]
RECIPES = ("deepseek_v4_mxfp4", "gpt_oss_padded", "mxfp8")
LOOPBACK = "run.runtime=loopback"
SMALLER = (LOOPBACK, "model.overrides.hidden_size=128")


def outputs(loaded: LoadedScenario) -> list[Tensor]:
    """[all own rows, H] of three forwards on the same buffers, the third with the other fill."""
    plan = plan_of(loaded)
    given = deal(batch_of(loaded, "random"), plan.sync, plan.seed)
    with LoopbackRanks(plan) as world:
        forwards = [world.forward(given, 60.0) for _ in range(3)]
    return [
        torch.cat([report.trace[Stage.GLUE_OUT]["hidden_states"] for report in reports])
        for reports in forwards
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_output_bit_depends_on_what_nobody_may_read(path):
    loaded = load_scenario(path, overrides=SMALLER)
    assert not unsupported_reasons(loaded.scenario, loaded.model)
    assert_same_bits(loaded)


@pytest.mark.parametrize("path", DISPATCH, ids=lambda path: path.stem)
def test_nor_where_nothing_is_quantised(path):
    assert_same_bits(load_scenario(path, overrides=(*SMALLER, "moe.recipe=bf16")))


@pytest.mark.parametrize("name", RECIPES)
def test_nor_with_groups_of_32_or_padded_experts(name):
    assert_same_bits(load_scenario(ROOT / "recipes" / f"{name}.yaml", overrides=[LOOPBACK]))


def assert_same_bits(loaded: LoadedScenario) -> None:
    first, second, other_fill = outputs(loaded)
    assert not bool(first.isnan().any())
    assert torch.equal(first, second)
    assert torch.equal(first, other_fill)
