"""Faults of what judges: a golden that is told something else, and one with nothing to change."""

from dataclasses import dataclass

import pytest

from moe.faults import arm, blinded_checks, edit_golden
from moe.formats import GatedActivation, ScaleFormat


@dataclass(frozen=True)
class Facts:
    scale_format: ScaleFormat
    activation: GatedActivation


FACTS = Facts(ScaleFormat.UE8M0, GatedActivation(limit=10.0))
PLAIN = Facts(ScaleFormat.FP32, GatedActivation())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("golden_of_other_scales", Facts(ScaleFormat.FP32, FACTS.activation)),
        ("golden_without_clamp", Facts(FACTS.scale_format, GatedActivation())),
    ],
)
def test_the_golden_is_told_something_else(fault, told):
    assert edit_golden(FACTS, [arm(fault, {}, (1,))]) == told


@pytest.mark.parametrize("fault", ["golden_of_other_scales", "golden_without_clamp"])
def test_a_golden_with_nothing_to_change_stays(fault):
    assert edit_golden(PLAIN, [arm(fault, {}, (1,))]) is PLAIN


def test_faults_of_ranks_and_of_checks_leave_the_golden_alone():
    faults = [arm("checker_blinded", {}, (1,)), arm("tokens_swapped", {}, (1,))]
    assert edit_golden(FACTS, faults) is FACTS
    assert blinded_checks(faults) == {"band"}
