"""A GEMM of somebody's own is judged like any other; what is none is refused with the reason."""

import pytest

from actors.driver import run_scenario
from scenarios.loader import load_scenario

BASE = "scenarios/smoke/ep2_dp.yaml"
MODULE = "tests.mutation.own_gemms"


def result_with(backend, *sets):
    options = ["run.runtime=loopback", f"run.backends.gemm={backend}", *sets]
    return run_scenario(load_scenario(BASE, overrides=options)).result


@pytest.mark.parametrize("mode", ["exact", "random"])
def test_a_right_one_agrees_and_is_named_in_the_result(mode):
    result = result_with(f"{MODULE}:Right", f"inputs.modes=[{mode}]")
    assert result.verdict == "agree"
    assert result.backends["gemm"].name == f"{MODULE}:Right"


@pytest.mark.parametrize("name", ["LastColumnsDropped", "Rounded"])
@pytest.mark.parametrize("mode", ["exact", "random"])
def test_a_wrong_one_is_found_in_its_first_product(name, mode):
    result = result_with(f"{MODULE}:{name}", f"inputs.modes=[{mode}]")
    assert (result.verdict, result.first_divergence.stage) == ("discrepancy", "gemm1")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("no.such:Class", "no.such:Class: No module named 'no'"),
        (f"{MODULE}:Missing", f"module '{MODULE}' has no attribute 'Missing'"),
        (f"{MODULE}:NoGemm", "is no GEMM backend: it lacks arithmetic, load, "),
    ],
    ids=["no module", "no class", "no backend"],
)
def test_what_is_no_backend_is_unsupported_with_the_reason(backend, reason):
    result = result_with(backend)
    assert result.verdict == "unsupported"
    assert reason in result.summary
