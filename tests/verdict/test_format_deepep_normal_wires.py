"""deepep_normal with bf16 on the wire: rows travel as they are, pre-permute quantises them."""

from dataclasses import replace

import pytest
import torch

from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import quantize_groups
from reports.verdict.formats.deepep_normal import (
    DeepEpNormalBf16WireView,
    DeepEpNormalView,
    deepep_normal_view,
)
from tests.verdict.clean_runs import SETTINGS, run_clean

BF16_WIRE = "moe.switches.deepep_bf16_dispatch=true"
ROWS, SCALE = "rows.hidden_states", "rows.hidden_states_scale"
RANK = 2


@pytest.fixture(scope="module", params=["ue8m0", "fp32"])
def bf16_wire(request):
    return run_clean(*SETTINGS[request.param], BF16_WIRE)


@pytest.fixture(scope="module")
def ue8m0():
    return run_clean(*SETTINGS["ue8m0"], BF16_WIRE)


def test_a_clean_run_has_nothing_to_report(bf16_wire):
    assert bf16_wire.judged().deviations == []


def test_both_wires_end_in_the_same_bits(ue8m0, clean_ue8m0):
    """The same quantiser acts on the same rows, before or behind the wire."""
    for rank in range(4):
        outputs = [run.tensor(Stage.TAIL, rank, "output") for run in (ue8m0, clean_ue8m0)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("settings", "view"),
    [
        ("ue8m0", DeepEpNormalView),
        ("bf16", DeepEpNormalBf16WireView),
    ],
)
def test_a_bf16_recipe_has_a_bf16_wire_without_asking(settings, view):
    layer = run_clean(*SETTINGS[settings]).resolved.judged
    assert type(deepep_normal_view(layer)) is view


def test_a_bf16_wire_moves_two_bytes_a_column(ue8m0, clean_ue8m0):
    """Row, 6 ids, 6 weights and a source row: 512 + 80 bytes; codes have 256 + 4 scale bytes."""
    for run, row_bytes in ((ue8m0, 512 + 80), (clean_ue8m0, 256 + 4 + 80)):
        rows = [calls[2] for calls in run.calls]
        assert all(call.payload_bytes % row_bytes == 0 for call in rows)
        assert sum(call.payload_bytes for call in rows) > 0


def test_a_row_that_changes_on_the_wire_is_found(ue8m0, last_places):
    arrived = ue8m0.tensor(Stage.DISPATCH, RANK, "hidden_states")
    received = ue8m0.route(RANK).received
    changed = last_places(arrived, received, 3, 1)
    first = ue8m0.first(Stage.DISPATCH, RANK, "hidden_states", changed)
    assert (first.rank, first.token) == (RANK, ue8m0.received_token(RANK, received))
    assert first.check == "contract: moves"


def test_a_row_that_is_put_on_the_wire_changed_is_found(ue8m0, last_places):
    wire = last_places(ue8m0.tensor(Stage.DISPATCH, 3, "wire"), 1, 3, 1)
    first = ue8m0.first(Stage.DISPATCH, 3, "wire", wire)
    assert (first.rank, first.token, first.columns) == (3, ue8m0.layer_token(3, 1), (0, 128))


def test_codes_on_a_wire_of_bf16_are_another_dtype(ue8m0):
    """Quantised by the sender although the receiver quantises."""
    wire = ue8m0.tensor(Stage.DISPATCH, 3, "wire")
    codes = quantize_groups(wire, ScaleFormat.UE8M0).values
    traces = ue8m0.changed(Stage.DISPATCH, 3, {"wire": codes})
    details = {one.detail for one in ue8m0.judged(traces).deviations if one.check == "contract"}
    assert "stored as torch.float8_e4m3fn; torch.bfloat16 is due" in details


def test_a_code_that_no_rule_gives_is_found(bf16_wire):
    route = bf16_wire.route(bf16_wire.last_rank)
    codes = bf16_wire.tensor(Stage.PRE_PERMUTE, bf16_wire.last_rank, ROWS).clone()
    codes.view(torch.uint8)[route.row, 7] ^= 8
    first = bf16_wire.first(Stage.PRE_PERMUTE, bf16_wire.last_rank, ROWS, codes)
    assert (first.token, first.slot, first.expert) == (route.token, route.slot, route.expert)
    assert "quantiser" in first.check


def test_a_scale_that_is_twice_as_large_is_found(bf16_wire, scaled_row):
    route = bf16_wire.route(bf16_wire.last_rank)
    scale = bf16_wire.tensor(Stage.PRE_PERMUTE, bf16_wire.last_rank, SCALE)
    traces = bf16_wire.changed(
        Stage.PRE_PERMUTE, bf16_wire.last_rank, {SCALE: scaled_row(scale, route.row, 1)}
    )
    first = bf16_wire.judged(traces).deviations[0]
    assert (first.stage, first.token, first.slot) == (Stage.PRE_PERMUTE, route.token, route.slot)


def test_grouped_rows_that_nobody_quantised_break_a_contract(ue8m0):
    """On every rank, as a pre-permute that knows nothing of the wire would leave them."""
    contracts = [
        one
        for one in ue8m0.judged([unquantised(trace) for trace in ue8m0.traces]).deviations
        if one.check == "contract" and one.stage is Stage.PRE_PERMUTE
    ]
    assert [(one.rank, one.tensor) for one in contracts] == [(rank, ROWS) for rank in range(4)]


def unquantised(trace):
    rows = {**trace[Stage.PRE_PERMUTE]}
    del rows[SCALE]
    rows[ROWS] = rows[ROWS].to(torch.bfloat16)
    return replace(trace, stages={**trace.stages, Stage.PRE_PERMUTE: rows})
