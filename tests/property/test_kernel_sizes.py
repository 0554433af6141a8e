"""Sizes that the real kernels take, held to: slabs run at them, and one step beside is refused."""

from pathlib import Path

import pytest

from actors.driver import run_scenario
from scenarios.errors import ScenarioError
from scenarios.loader import load_scenario

DISPATCH = Path(__file__).parents[2] / "scenarios" / "dispatch"
STRICT = (
    "run.runtime=loopback",
    "inputs.modes=[random]",
    "moe.strict_shapes=true",
    "parallel.world_size=2",
    "parallel.attention={dp: 2}",
    "parallel.moe={ep: 2}",
    "batch.tokens=[3, 0]",
    "moe.switches.max_dispatch_tokens_per_rank=32",
    "model.overrides={n_routed_experts: 4, num_experts_per_tok: 2}",
)
SLABS = ("deepep_ll", "deepep_ll_bf16_wire", "standard_masked", "deepep_v2_decode")


def sized(name: str, hidden_size: int, intermediate_size: int):
    sizes = {"hidden_size": hidden_size, "moe_intermediate_size": intermediate_size}
    overrides = tuple(f"model.overrides.{key}={value}" for key, value in sizes.items())
    path = DISPATCH / f"{name}.yaml"
    return load_scenario(path, overrides=(*STRICT, *overrides))


@pytest.mark.parametrize("name", SLABS)
def test_slabs_run_at_sizes_that_the_kernels_take(name):
    result = run_scenario(sized(name, 2048, 512), asks=False).result
    assert (result.verdict, [note for note in result.notes if "not enforced" in note]) == (
        "agree",
        [],
    )


@pytest.mark.parametrize(
    ("name", "hidden_size", "intermediate_size", "piece"),
    [
        ("deepep_ll", 1024, 512, "is none of deepep_ll's 2048"),
        ("deepep_ll", 2048, 384, "% 4 != 0 with I = 384"),
        ("standard_masked", 1280, 512, "hidden_size(1280)"),
    ],
)
def test_a_size_that_a_kernel_refuses_is_refused(name, hidden_size, intermediate_size, piece):
    with pytest.raises(ScenarioError) as refused:
        sized(name, hidden_size, intermediate_size)
    assert piece in str(refused.value)
