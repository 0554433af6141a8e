"""Scales of padding: zero where they are packed, anything where they are fp32."""

import pytest

from moe.formats import Stage

SCALE = "rows.hidden_states_scale"


@pytest.fixture
def spoilt_padding():
    """(deviations of the contract, padding row) once one scale of a padding row is not zero."""

    def spoil(run, rank):
        scale = run.tensor(Stage.PRE_PERMUTE, rank, SCALE)
        live = run.tensor(Stage.PRE_PERMUTE, rank, "rows.live_rows").tolist()
        row = min(set(range(len(scale))) - set(live))
        wrong = scale.clone()
        wrong[row, 0] = 127
        traces = run.changed(Stage.PRE_PERMUTE, rank, {SCALE: wrong})
        return run.judged(traces).deviations, row

    return spoil


@pytest.mark.parametrize("layout", [None, "dp_ep_reduce_scatter_v"], ids=["announced", "counted"])
def test_a_packed_scale_that_a_gemm_would_read_of_padding_is_found(
    clean_ue8m0, clean_layout, spoilt_padding, layout
):
    run = clean_layout(layout) if layout else clean_ue8m0
    (one,), row = spoilt_padding(run, 1)
    assert (one.check, one.stage, one.rank, one.tensor) == (
        "contract",
        Stage.PRE_PERMUTE,
        1,
        SCALE,
    )
    assert one.detail == f"padding row {row} is not zero; 1 such rows"


def test_an_fp32_scale_of_padding_may_be_anything(clean_fp32, spoilt_padding):
    deviations, _ = spoilt_padding(clean_fp32, 1)
    assert deviations == []
