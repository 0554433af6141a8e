"""A slice of ``benchmarks/recipes.py``: what rules refuse, and that the rest agrees on loopback."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from benchmarks.recipes import Case, cases, means_something, refusals, run

SCALES = "recipe_has_its_scales_on_platform"
KERNELS = "recipe_has_kernels_on_platform"
NO_SLABS = "sm120_has_no_masked_layout"
V2_RECIPE = "deepep_v2_takes_the_recipe"
V2_MODEL = "model_is_registered_with_deepep_v2"
V2_SILU = "deepep_v2_takes_silu"

REFUSED = {
    ("mxfp8", "sm90"): {SCALES},
    ("mxfp4_w4a8", "sm90"): {SCALES},
    ("mxfp8", "sm120"): {KERNELS},
    ("sm120", "standard masked"): {NO_SLABS},
    ("fp8_per_tensor", "deepep_v2 extend"): {V2_RECIPE},
    ("fp8_per_tensor", "deepep_v2 decode"): {V2_RECIPE},
    ("mxfp4_w4a8", "deepep_v2 extend"): {V2_RECIPE},
    ("mxfp4_w4a8", "deepep_v2 decode"): {V2_RECIPE},
    ("oai_swiglu", "deepep_v2 extend"): {V2_MODEL},
    ("oai_swiglu", "deepep_v2 decode"): {V2_MODEL},
    ("situ", "deepep_v2 extend"): {V2_MODEL, V2_SILU},
    ("situ", "deepep_v2 decode"): {V2_MODEL, V2_SILU},
}
"""Pairs that are refused whatever the rest of a combination is, and the rules that do it."""


def pairs(case: Case) -> Iterator[tuple[str, str]]:
    names = (case.recipe, case.platform, case.activation, case.dispatcher)
    return itertools.combinations(names, 2)


broken = cache(refusals)


def refused_by(case: Case) -> set[str]:
    return {rule.name for rule in broken(case)}


def test_the_pairs_of_the_table_explain_every_refusal():
    differing = {
        str(case): refused_by(case)
        for case in cases()
        if refused_by(case) != set().union(*(REFUSED.get(pair, set()) for pair in pairs(case)))
    }
    assert differing == {}


def test_rules_refuse_as_many_combinations_as_their_pairs_have():
    """6 recipes, 3 platforms, 4 activations, 7 dispatchers: 28 with one recipe on one platform."""
    assert Counter(rule for case in cases() for rule in refused_by(case)) == {
        SCALES: 2 * 28,
        KERNELS: 28,
        NO_SLABS: 6 * 4,
        V2_RECIPE: 2 * 2 * 3 * 4,
        V2_MODEL: 2 * 2 * 6 * 3,
        V2_SILU: 2 * 6 * 3,
    }


def covering() -> Iterator[Case]:
    """Few combinations that have each pair of two names that any runnable one has."""
    runnable = [case for case in cases() if means_something(broken(case))]
    left = {pair for case in runnable for pair in pairs(case)}
    while left:
        best = max(runnable, key=lambda case: len(left.intersection(pairs(case))))
        left -= set(pairs(best))
        yield best


@pytest.mark.parametrize("case", list(covering()), ids=str)
def test_a_combination_that_means_something_agrees(case: Case):
    result = run(case, asks=False)
    assert result.verdict == "agree", result.summary
