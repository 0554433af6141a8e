"""Every fault is called by its name: its first finding names its kind of mistake."""

import pytest

from actors.driver import check_input, run_scenario
from moe.faults import FAULTS
from moe.faults.mistaken import MISTAKES, NOT_DIAGNOSED
from moe.mistakes import Mistake
from reports.verdict.exact_compared import EXACT
from scenarios.errors import ScenarioError
from scenarios.loader import LoadedScenario
from tests.mutation.test_faults import FOUND, every, run
from tests.mutation.worlds import judged, load

FACTOR_OF_NO_LAYER = ("scaling_factor_in_router", "tp")
"""The layer has no scaling factor, and a gain of any number is no kind of mistake."""

NAMED = [case for case in FOUND if (case.fault, case.world) != FACTOR_OF_NO_LAYER]

FEW_VALUES = {
    ("dropped_route_to_first_rank", "flashinfer decode"),
    ("expert_chosen_twice", "a2a"),
    ("expert_chosen_twice", "ep and tp"),
    ("hash_of_next_entry", "hashed"),
    ("partial_doubled", "slabs ll"),
    ("received_rows_clipped", "a2a"),
    ("scale_col_coarse", "experts mxfp4"),
    ("scale_col_coarse", "scales mx"),
    ("scale_index_wraps", "flashinfer decode"),
    ("scale_index_wraps", "v2"),
    ("scale_of_first_block:stage=pre_permute", "scales mx"),
    ("scale_of_next_block", "scales"),
    ("scale_of_next_row", "a2a fp32 scales"),
    ("scale_of_next_row", "scales mx"),
    ("scale_rounded_down", "a2a"),
    ("scale_rounded_down", "slabs"),
    ("scale_rounded_down", "v2 expanded"),
    ("stale_counts", "slabs ll"),
}
"""One coefficient, id or count, or scales that are like one another: luck might hit them."""

TWO_KINDS = {
    ("chunks_read_as_equal", "a2a of chunks"),
    ("combine_slot_stale", "flashinfer decode"),
    ("combine_slot_stale", "slabs ll"),
    ("fp32_scale_read_as_packed", "scales of tensors"),
    ("gemm_tail_rows_dropped:tile=4", "slabs ll"),
    ("pack_mantissa_leak", "slabs"),
    ("packed_scale_sent_raw_expected", "v2"),
    ("pad_slot_ids_kept", "flashinfer decode"),
    ("stale_row", "flashinfer decode"),
}
"""A second kind explains the same few rows: a stale row is also that of another token."""

PADDING_HOLDS_NUMBERS = {
    ("padded_columns_filled", "experts oai"),
    ("padded_columns_filled", "experts oai in segments"),
    ("padded_rows_loaded", "experts oai"),
    ("padding_row_counted", "a2a"),
    ("padding_row_counted", "flashinfer decode"),
    ("padding_row_counted", "summed in the tail"),
    ("padding_rows_routed", "a2a of halves"),
    ("padding_scales_unwritten", "flashinfer extend"),
    ("padding_scales_unwritten", "v2"),
}
"""Which numbers, no law predicts."""

LESS_THAN_ALL = {
    ("scales_in_wrong_layout", "scales mx"),
    ("scales_in_wrong_layout:stage=activation", "scales mx"),
}
"""A row that no plan knows of, that of a dummy, is among those that the scales were read from."""

PERHAPS = FEW_VALUES | TWO_KINDS | PADDING_HOLDS_NUMBERS | LESS_THAN_ALL


def fault_of(case):
    return FAULTS[case.fault.partition(":")[0]]


@every(NAMED)
def test_a_fault_is_named_by_its_kind_of_mistake(case):
    first = run(case).result.findings[0]
    assert first.mistake in fault_of(case).mistakes, first.diagnosis


@every(NAMED)
def test_a_diagnosis_is_sure_unless_luck_or_another_kind_might_have_done_it(case):
    first = run(case).result.findings[0]
    is_sure = (case.fault, case.world) not in PERHAPS
    assert first.confidence == ("high" if is_sure else "low"), first.diagnosis


def test_four_of_five_diagnoses_are_sure():
    sure = [case for case in NAMED if (case.fault, case.world) not in PERHAPS]
    assert len(sure) / len(NAMED) > 4 / 5


def test_no_exception_is_one_of_a_case_that_is_gone():
    assert {(case.fault, case.world) for case in NAMED} >= PERHAPS


@every(NAMED)
def test_the_summary_names_the_diagnosis(case):
    result = run(case).result
    assert result.findings[0].diagnosis in result.summary


@every([case for case in FOUND if case not in NAMED])
def test_a_gain_of_any_number_is_unexplained_and_its_size_is_told(case):
    first = run(case).result.findings[0]
    assert (first.mistake, first.confidence) == (None, "none")
    assert "got / due is 1.5 in the middle, 1.5 to 1.5 for most" in first.diagnosis


ON_EXACT_INPUTS = (
    "gate_up_swapped",
    "expert_chosen_twice",
    "tokens_swapped",
    "output_index_divided_twice",
    "tile_of_next_block",
    "routed_no_clamp",
    "scale_rounded_down",
    "topk_weights_twice",
    "partial_dropped",
    "partial_doubled",
    "combine_rows_raced",
    "scaling_factor_twice:rank=3",
    "shared_expert_missing",
)


@pytest.mark.parametrize("fault", ON_EXACT_INPUTS)
def test_on_exact_inputs_a_fault_has_the_same_name(fault):
    result = judged("a2a", fault, sets=("inputs.modes=[exact]",)).result
    first, kinds = result.findings[0], FAULTS[fault.partition(":")[0]].mistakes
    is_sure = (fault, "a2a") not in PERHAPS
    assert first.confidence == "high" or not is_sure, first.diagnosis
    of_cells = [one for one in result.findings if one.check == EXACT]
    assert {first.mistake, *(one.mistake for one in of_cells)} <= kinds
    assert of_cells or first.stage in {"weights", "route"}


def test_a_fault_has_kinds_of_mistake_or_a_reason_why_not():
    assert MISTAKES.keys() | NOT_DIAGNOSED.keys() == FAULTS.keys()
    assert MISTAKES.keys() & NOT_DIAGNOSED.keys() == set()


def test_no_fault_goes_by_every_name():
    assert all(1 <= len(kinds) <= 2 for kinds in MISTAKES.values())
    assert set().union(*MISTAKES.values()) == set(Mistake)


def expecting(stage: str, fault: str) -> LoadedScenario:
    """Swapped tokens, with what is expected of them."""
    expect = f"expect={{verdict: discrepancy, stage: {stage}, fault: {fault}}}"
    return load("a2a", "tokens_swapped", sets=(expect,))


@pytest.mark.parametrize(
    ("stage", "fault", "as_expected"),
    [
        ("dispatch", "tokens_swapped", True),
        ("dispatch", "row_index_wraps", True),
        ("dispatch", "stale_row", False),
        ("tail", "tokens_swapped", False),
    ],
)
def test_an_expected_fault_is_met_by_its_stage_and_a_diagnosis_of_its_kind_alone(
    stage, fault, as_expected
):
    result = run_scenario(expecting(stage, fault), asks=False).result
    assert result.as_expected is as_expected


def test_a_fault_that_nothing_can_diagnose_cannot_be_expected():
    with pytest.raises(ScenarioError, match=r"expect\.fault: no diagnosis can name rank_raises"):
        check_input(expecting("dispatch", "rank_raises"))
