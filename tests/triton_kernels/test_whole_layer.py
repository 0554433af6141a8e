"""Triton's kernels inside a whole layer: on a GPU where there is one, interpreted elsewhere."""

import pytest
import torch

from actors.driver import run_scenario
from actors.kernels import row_kernels
from scenarios.loader import load_scenario

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DISPATCH = {
    "deepep_normal": (),
    "deepep_ll": ("batch.phase=decode", "moe.switches.max_dispatch_tokens_per_rank=4"),
}


@pytest.mark.parametrize("dispatcher", DISPATCH)
def test_two_ranks_agree_with_kernels_in_either_mode(dispatcher):
    sets = f"moe.dispatcher={dispatcher}", *DISPATCH[dispatcher]
    by = "run.backends.kernels=triton", f"run.device={DEVICE}"
    small = "run.runtime=loopback", "batch.tokens=[3, 1]", "inputs.modes=[exact, random]"
    loaded = load_scenario("scenarios/smoke/ep2_dp.yaml", overrides=[*sets, *by, *small])
    result = run_scenario(loaded, asks=False).result
    assert (result.verdict, result.backends["kernels"].name) == ("agree", "triton")
    judged = {check.name for check in result.checks if check.verdict == "agree"}
    assert {"exact", "band", "contract"} <= judged, judged


def test_kernels_go_by_their_names():
    assert [row_kernels(name).name for name in ("torch", "triton")] == ["torch", "triton"]
