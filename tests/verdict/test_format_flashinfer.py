"""What ``flashinfer`` promises in both forms, by traces that break it in one place."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from actors.driver import run_scenario
from moe.formats import Stage
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.subject import Subject
from scenarios.loader import load_scenario
from tests.verdict.clean_runs import FOUR_RANKS, SMOKE, run_clean

FLASHINFER = ("moe.dispatcher=flashinfer", *FOUR_RANKS)
DECODE, EXTEND = "decode", "extend"
HEIGHT = 9
"""In decode the rows that each of four ranks may write to another; the ranks hold 5, 0, 9, 3."""

BOTH = pytest.mark.parametrize("form", [DECODE, EXTEND])
SENT_TO, SENT_AS, COUNTS = "handle.target_rank", "handle.send_index", "handle.counts"


@cache
def clean(form, *settings):
    return run_clean(*FLASHINFER, f"batch.phase={form}", "moe.layout=compact", *settings)


def subject_of(run):
    return Subject(run.resolved.judged, run.view, run.batch, run.traces)


def received(run, rank, name):
    return run.tensor(Stage.DISPATCH, rank, name).clone()


def a_real_row(run, rank):
    """(received row, its token) of the last one that some rank sent."""
    rows = subject_of(run).received_rows(rank)
    at = int((rows.token >= 0).nonzero()[-1])
    return at, int(rows.token[at])


def found(run, stage, rank, tensors, check):
    deviations = run.judged(run.changed(stage, rank, tensors)).deviations
    return [one for one in deviations if (one.stage, one.check) == (stage, check)]


SETTINGS = {
    "packed scales": (),
    "fp32 scales in slabs": ("platform=sm90", "moe.layout=masked"),
    "bf16": ("moe.recipe=bf16",),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@BOTH
def test_a_clean_run_has_no_deviation(form, settings):
    assert clean(form, *settings).judged().deviations == []


@BOTH
def test_every_stage_of_every_rank_with_rows_is_compared(form):
    run = clean(form)
    entered = set(run.judged().worst)
    assert {(stage, rank) for rank in (0, 2, 3) for stage in Stage} <= entered


@BOTH
@pytest.mark.parametrize("name", ["hidden_states", "topk_weights"])
def test_a_received_row_that_is_not_its_sources_is_located(form, name):
    run, rank = clean(form), 3
    row, token = a_real_row(run, rank)
    values = received(run, rank, name)
    values[row, 1] *= 2
    first = found(run, Stage.DISPATCH, rank, {name: values}, "contract: moves")[0]
    assert (first.rank, first.tensor, first.token) == (rank, name, token)


@BOTH
def test_a_received_id_that_is_not_its_sources_is_located(form):
    run, rank = clean(form), 2
    row, token = a_real_row(run, rank)
    ids = received(run, rank, "topk_ids")
    ids[row, 3] = (ids[row, 3] + 1) % 2
    (first,) = found(run, Stage.DISPATCH, rank, {"topk_ids": ids}, "contract: moves")
    assert (first.rank, first.tensor, first.token, first.slot) == (rank, "topk_ids", token, 3)


def test_a_stale_row_that_keeps_its_ids_is_found():
    """Rank 1 wrote nothing to anyone, so its first row on rank 0 is an earlier forward's."""
    run = clean(DECODE)
    ids = received(run, 0, "topk_ids")
    assert ids[HEIGHT].tolist() == [-1] * 6
    ids[HEIGHT, 0] = 0
    (first,) = found(run, Stage.DISPATCH, 0, {"topk_ids": ids}, "contract: moves")
    assert (first.rank, first.token, first.got, first.want) == (0, None, 0, -1)


@pytest.mark.parametrize(
    ("form", "least", "shift"),
    [(DECODE, 6, -6), (EXTEND, 0, 6)],
    ids=["local too early in decode", "left global in prefill"],
)
def test_ids_counted_from_another_slot_are_found(form, least, shift):
    run, rank = clean(form), 3
    ids = received(run, rank, "topk_ids")
    ids[ids >= least] += shift
    moved = found(run, Stage.DISPATCH, rank, {"topk_ids": ids}, "contract: moves")
    assert {(one.rank, one.tensor) for one in moved} == {(rank, "topk_ids")}


@BOTH
@pytest.mark.parametrize("off", [1, -1])
def test_a_count_that_is_not_what_a_rank_sent_is_found(form, off):
    run, rank = clean(form), 3
    counts = received(run, rank, COUNTS)
    counts[2] += off
    (first,) = found(run, Stage.DISPATCH, rank, {COUNTS: counts}, "accounts")
    assert (first.rank, first.tensor) == (rank, COUNTS)
    assert first.got == first.want + off


def two_messages(run, sender, receiver):
    """[2] rows and [2] slots of two messages to one rank."""
    to_rank = run.tensor(Stage.DISPATCH, sender, SENT_TO) == receiver
    rows, slots = to_rank.nonzero(as_tuple=True)
    return rows[:2], slots[:2]


def test_messages_that_claim_each_others_row_hold_the_wrong_tokens():
    run = clean(DECODE)
    rows, slots = two_messages(run, sender=2, receiver=3)
    index = received(run, 2, SENT_AS)
    index[rows, slots] = index[rows.flip(0), slots.flip(0)]
    moved = found(run, Stage.DISPATCH, 2, {SENT_AS: index}, "contract: moves")
    assert {(one.rank, one.tensor) for one in moved} >= {(3, "hidden_states")}
    assert {one.rank for one in moved} == {3}


def test_two_messages_in_one_row_lose_a_token():
    run = clean(DECODE)
    rows, slots = two_messages(run, sender=2, receiver=3)
    index = received(run, 2, SENT_AS)
    index[rows[0], slots[0]] = index[rows[1], slots[1]]
    lost = found(run, Stage.DISPATCH, 2, {SENT_AS: index}, "accounts")
    (first,) = [one for one in lost if one.tensor == SENT_AS]
    assert (first.rank, first.got, first.want) == (3, 0, 1)
    assert first.token in {run.layer_token(2, int(row)) for row in rows}


def test_a_gap_between_the_rows_of_a_rank_breaks_the_contract():
    """Rank 3 has three tokens of nine rows; one of them moves behind the others."""
    run = clean(DECODE)
    rows, slots = two_messages(run, sender=3, receiver=0)
    index = received(run, 3, SENT_AS)
    index[rows[0], slots[0]] = HEIGHT - 1
    (first,) = found(run, Stage.DISPATCH, 3, {SENT_AS: index}, "contract")
    assert (first.rank, first.tensor) == (0, SENT_AS)
    assert first.detail.startswith("rank 3 wrote rows")


def test_a_row_that_does_not_exist_makes_the_trace_unreadable():
    run = clean(DECODE)
    rows, slots = two_messages(run, sender=3, receiver=0)
    index = received(run, 3, SENT_AS)
    index[rows[0], slots[0]] = HEIGHT
    with pytest.raises(UnreadableTraceError, match="rank 3: wrote to row 9 of 9 on rank 0"):
        run.judged(run.changed(Stage.DISPATCH, 3, {SENT_AS: index}))


def test_a_message_at_a_later_expert_of_its_rank_is_located():
    """A token has more than one expert on rank 0; its message belongs to the first one's slot."""
    run, sender = clean(DECODE), 2
    owner = run.tensor(Stage.DISPATCH, sender, "physical_ids") // 2
    row = int(((owner == 0).sum(1) > 1).nonzero()[0])
    first_slot, later = (owner[row] == 0).nonzero()[:2, 0].tolist()
    target, index = received(run, sender, SENT_TO), received(run, sender, SENT_AS)
    for tensor in (target, index):
        tensor[row, later] = tensor[row, first_slot]
        tensor[row, first_slot] = -1
    moved = found(run, Stage.DISPATCH, sender, {SENT_TO: target, SENT_AS: index}, "contract: moves")
    assert {(one.rank, one.tensor) for one in moved} == {(sender, SENT_TO), (sender, SENT_AS)}
    assert {one.token for one in moved} == {run.layer_token(sender, row)}


def test_a_token_that_is_not_sent_has_not_arrived():
    run, sender = clean(DECODE), 2
    rows, slots = two_messages(run, sender, receiver=3)
    target, index = received(run, sender, SENT_TO), received(run, sender, SENT_AS)
    target[rows[0], slots[0]] = index[rows[0], slots[0]] = -1
    deviations = found(run, Stage.DISPATCH, sender, {SENT_TO: target, SENT_AS: index}, "accounts")
    (arrival,) = [one for one in deviations if one.tensor == SENT_AS]
    assert (arrival.rank, arrival.token) == (3, run.layer_token(sender, int(rows[0])))
    assert (arrival.got, arrival.want) == (0, 1)


@BOTH
def test_another_number_of_received_rows_is_unreadable(form):
    run, rank = clean(form), 3
    stages = dict(run.traces[rank].stages)
    of_rows = {"hidden_states", "topk_ids", "topk_weights"}
    stages[Stage.DISPATCH] = {
        name: tensor[:-1] if name in of_rows else tensor
        for name, tensor in stages[Stage.DISPATCH].items()
    }
    stages[Stage.PRE_PERMUTE] = {
        name: tensor[:-1] if name.startswith("restore.") else tensor
        for name, tensor in stages[Stage.PRE_PERMUTE].items()
    }
    stages[Stage.POST_PERMUTE] = {"partial": stages[Stage.POST_PERMUTE]["partial"][:-1]}
    traces = list(run.traces)
    traces[rank] = replace(traces[rank], stages=stages)
    with pytest.raises(UnreadableTraceError, match=r"rank 3: \d+ received rows"):
        run.judged(traces)


@BOTH
def test_a_way_back_with_other_ids_is_found(form):
    run, rank = clean(form), 2
    ids = run.tensor(Stage.PRE_PERMUTE, rank, "restore.topk_ids").clone()
    row, slot = (ids >= 0).nonzero()[0].tolist()
    ids[row, slot] = 1 - ids[row, slot]
    moved = found(run, Stage.PRE_PERMUTE, rank, {"restore.topk_ids": ids}, "contract: moves")
    assert [(one.rank, one.tensor, one.slot) for one in moved] == [(rank, "restore.topk_ids", slot)]


def test_a_route_of_another_ranks_expert_has_no_grouped_row():
    run, rank = clean(DECODE), 2
    index = run.tensor(Stage.PRE_PERMUTE, rank, "restore.output_index").clone()
    row, slot = (index < 0).nonzero()[0].tolist()
    index[row, slot] = 5
    (first,) = found(run, Stage.PRE_PERMUTE, rank, {"restore.output_index": index}, "contract")[:1]
    assert (first.rank, first.tensor, first.slot) == (rank, "restore.output_index", slot)


@pytest.mark.parametrize(
    ("form", "rows"), [(DECODE, 4 * HEIGHT), (EXTEND, 17)], ids=[DECODE, EXTEND]
)
def test_the_buffer_counts_every_slot_of_every_received_row(form, rows):
    run, rank = clean(form), 3
    experts = run.tensor(Stage.PRE_PERMUTE, rank, "rows.m_indices")
    block = run.resolved.judged.row_alignment
    assert len(experts) == block * (2 + (6 * rows - 2) // block)
    (first,) = found(
        run, Stage.PRE_PERMUTE, rank, {"rows.m_indices": experts[:-block]}, "contract"
    )[:1]
    assert (first.rank, first.tensor) == (rank, "rows.m_indices")


def test_a_partial_of_a_row_without_a_token_is_zero():
    run = clean(DECODE)
    partial = run.tensor(Stage.POST_PERMUTE, 0, "partial").clone()
    partial[HEIGHT, 7] = 1.0
    (first,) = found(run, Stage.POST_PERMUTE, 0, {"partial": partial}, "band")
    assert (first.rank, first.token, first.got, first.want) == (0, None, 1, 0)


@BOTH
@pytest.mark.parametrize("times", [-1, 1], ids=["missing", "twice"])
def test_a_ranks_partial_that_is_missing_or_added_twice_is_an_error_of_combine(form, times):
    run, home, away = clean(form), 3, 1
    source = subject_of(run).received_from[away]
    at = subject_of(run).layer_starts[home]
    row = int((source == at).nonzero()[0])
    partial = run.tensor(Stage.POST_PERMUTE, away, "partial")[row].float()
    assert bool(partial.any())
    routed = run.tensor(Stage.COMBINE, home, "routed").clone()
    routed[0] = (routed[0].float() + times * partial).to(torch.bfloat16)
    (first,) = found(run, Stage.COMBINE, home, {"routed": routed}, "band")
    assert (first.rank, first.token) == (home, run.layer_token(home, 0))


@BOTH
def test_the_bytes_of_every_call_are_known(form):
    run = clean(form)
    of_the_format = [i for i, call in enumerate(run.calls[2]) if call.stage != Stage.WEIGHTS]
    assert len(of_the_format) == {DECODE: 3, EXTEND: 4}[form]
    for place in of_the_format:
        calls = [list(of_rank) for of_rank in run.calls]
        made = calls[2][place]
        calls[2][place] = replace(made, payload_bytes=made.payload_bytes + 2)
        (first,) = run.judged(calls=calls).deviations
        assert (first.check, first.stage, first.rank) == ("accounts", made.stage, 2)
        assert first.got == first.want + 2


@BOTH
@pytest.mark.parametrize(
    ("fault", "stage"),
    [("scaling_factor_twice", Stage.TAIL), ("scaling_factor_missing", Stage.POST_PERMUTE)],
    ids=["twice", "missing"],
)
def test_a_wrong_scaling_factor_is_found_where_it_acts_and_nowhere_else(form, fault, stage):
    settings = ("run.runtime=loopback", *FLASHINFER, f"batch.phase={form}")
    result = run_scenario(load_scenario(SMOKE, overrides=settings, injects=(fault,))).result
    assert {finding.stage for finding in result.findings} == {stage}
