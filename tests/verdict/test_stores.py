"""A store that a path declares and a run leaves out is seen, and is not hidden in the next one."""

import pytest
import torch

from actors.driver import run_scenario
from moe.formats import GemmLayout, Stage
from moe.runner import RunnerCore
from reports.verdict.stores import row_keys
from tests.mutation.worlds import load

WITHOUT_CLAMP = ("model.overrides.swiglu_limit=null", "batch.tokens=[15, 0, 16, 13]")


@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_silu_that_is_not_stored_before_its_product_is_found(platform, monkeypatch):
    world = load("slabs ll", sets=(*WITHOUT_CLAMP, f"platform={platform}"))
    assert run_scenario(world, asks=False).result.verdict == "agree"
    activate = RunnerCore.activate
    monkeypatch.setattr(
        RunnerCore, "activate", lambda core, rows, _: activate(core, rows, GemmLayout.CONTIG)
    )
    first = run_scenario(world, asks=False).result.first_divergence
    assert (first.stage, first.tensor) == (Stage.ACTIVATION, "activation")


def test_equal_rows_have_one_key_and_others_have_others():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, 96, generator=generator).to(torch.bfloat16).double()
    values[1] = values[0].roll(1)
    values[2] = -values[0]
    keys = row_keys(torch.cat([values, values]))
    assert torch.equal(keys[:1000], keys[1000:])
    assert len(torch.unique(keys)) == 1000
