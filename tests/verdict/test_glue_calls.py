"""Collectives that the glue owes: who, in which stage, and with how many bytes."""

from dataclasses import replace

import pytest

from reports.verdict.glue_calls import glue_calls_due

H = 256
WORLD = (0, 1, 2, 3)
PAIR = (0, 1)


def due(clean_layout, layout, rank):
    judged = clean_layout(layout).resolved.judged
    return [
        (str(call.stage), call.op, call.group, call.payload_bytes)
        for call in glue_calls_due(judged, rank)
    ]


# Own rows go in, all rows come back; bf16 has two bytes.
DUE = {
    ("pure_tp", 1): [("tail", "all_reduce", PAIR, 7 * H * 2)],
    ("dp_tp_all_reduce", 3): [
        ("glue_in", "all_reduce", WORLD, (6 + 4) * H * 2),
        ("tail", "all_reduce", WORLD, (6 + 4) * H * 2),
    ],
    ("dp_ep_reduce_scatter_v", 0): [
        ("glue_in", "all_gather_v", WORLD, 5 * H * 2),
        ("glue_out", "reduce_scatter_v", WORLD, 17 * H * 2),
    ],
    ("dp_ep_reduce_scatter_v", 1): [
        ("glue_in", "all_gather_v", WORLD, 0),
        ("glue_out", "reduce_scatter_v", WORLD, 17 * H * 2),
    ],
    ("cp_gather", 2): [
        ("glue_in", "all_gather_v", WORLD, 4 * H * 2),
        ("glue_out", "reduce_scatter_v", WORLD, 16 * H * 2),
    ],
    ("tp_ep_all_to_all", 3): [("glue_out", "all_gather_v", WORLD, 1 * H * 2)],
    ("masked_max_len", 2): [
        ("glue_in", "reduce_scatter_v", (2, 3), 4 * H * 2),
        ("glue_in", "all_gather_v", WORLD, 2 * H * 2),
        ("tail", "all_reduce", WORLD, 8 * H * 2),
    ],
    ("hash_layer", 1): [
        ("glue_in", "all_gather_v", PAIR, 5 * H * 2),
        ("glue_in", "all_gather_v", PAIR, 5 * 8),
        ("glue_out", "reduce_scatter_v", PAIR, 10 * H * 2),
    ],
    ("dp_gather_fp8", 1): [
        ("glue_in", "all_gather_v", PAIR, 3 * H),
        ("glue_in", "all_gather_v", PAIR, 3 * 2 * 4),
        ("glue_out", "reduce_scatter_v", PAIR, 8 * H * 2),
    ],
}


@pytest.mark.parametrize(("layout", "rank"), DUE, ids=lambda value: str(value))
def test_calls_and_bytes_due_follow_from_the_plan(clean_layout, layout, rank):
    assert due(clean_layout, layout, rank) == DUE[layout, rank]


@pytest.mark.parametrize(("layout", "rank"), DUE, ids=lambda value: str(value))
@pytest.mark.parametrize("change", ["missing", "more bytes"])
def test_a_call_that_the_glue_did_not_make_as_due_is_found(clean_layout, layout, rank, change):
    run = clean_layout(layout)
    stage = DUE[layout, rank][0][0]
    calls = [list(made) for made in run.calls]
    at = next(i for i, call in enumerate(calls[rank]) if call.stage == stage)
    if change == "missing":
        del calls[rank][at]
    else:
        calls[rank][at] = replace(calls[rank][at], payload_bytes=calls[rank][at].payload_bytes + 2)
    found = run.judged(calls=calls).deviations
    assert {(one.check, one.stage, one.rank) for one in found} == {("accounts", stage, rank)}
