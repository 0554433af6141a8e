"""A fault of a scale is told from one of the codes under it."""

import pytest

from moe.formats import Stage
from tests.mutation.scale_cases import OF_CODES, OF_FORM, SCALES_FOUND
from tests.mutation.worlds import judged

ON_ROWS = [case for case in SCALES_FOUND if case.stage is not Stage.WEIGHTS]


def of(kinds):
    return [case for case in ON_ROWS if case.fault.partition(":")[0] in kinds]


def every(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def first(case):
    return judged(case.world, case.fault, sets=case.sets).result.first_divergence


@every([case for case in ON_ROWS if case not in of(OF_CODES | OF_FORM)])
def test_a_fault_of_scales_is_found_in_the_scales(case):
    assert first(case).tensor.endswith("hidden_states_scale")


@every(of(OF_CODES))
def test_a_fault_of_codes_is_found_in_the_codes(case):
    assert first(case).tensor.endswith("hidden_states")


@every(of(OF_FORM))
def test_scales_of_another_form_break_the_contract_of_dispatch(case):
    found = first(case)
    assert (found.stage, found.check) == (Stage.DISPATCH, "contract")
    assert "torch.int32" in found.detail


@every([case for case in SCALES_FOUND if case.stage is Stage.WEIGHTS])
def test_a_fault_of_weight_scales_is_found_in_the_first_matrix(case):
    assert first(case).tensor == "experts.w13"
