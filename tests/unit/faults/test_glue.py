"""Faults of the glue: rows that are taken or kept from the wrong place."""

from dataclasses import dataclass

import pytest
import torch

from moe.faults.glue import replicated_rows_dispatched, slot_of_next_group, token_shard_shifted
from moe.formats import Stage
from moe.stages import GlueInOutput, GlueOutOutput, TailOutput
from tests.unit.faults.values import context
from topology.layout import ParallelLayout
from topology.sync import Gather, Return, SyncOptions, SyncPlan, sync_plan


def rows(*values):
    return torch.tensor(values, dtype=torch.float32).view(-1, 1)


@pytest.mark.parametrize(
    ("part", "late"), [((1, 2), [2, 3]), ((3, 4, 5), [4, 5, 1]), ((1,), [2])], ids=str
)
def test_a_shard_begins_one_row_late(part, late):
    taken = GlueInOutput(own=rows(1, 2, 3, 4, 5), hidden_states=rows(*part))
    assert token_shard_shifted(taken, context()).hidden_states.flatten().tolist() == late


@pytest.mark.parametrize(
    ("own", "layer"), [((1, 2), (1, 2)), ((1, 2), (1, 2, 3)), ((), ())], ids=str
)
def test_rows_that_are_no_shard_stay(own, layer):
    taken = GlueInOutput(own=rows(*own), hidden_states=rows(*layer))
    assert token_shard_shifted(taken, context()) is taken


def left_by(own, left):
    seen = {
        Stage.GLUE_IN: GlueInOutput(own=own, hidden_states=rows(1, 2, 3, 4, 5)),
        Stage.TAIL: TailOutput(shared=None, output=rows(10, 20, 30, 40, 50)),
    }
    return slot_of_next_group(GlueOutOutput(hidden_states=left), context(seen))


@pytest.mark.parametrize(
    ("own", "left", "behind"),
    [((1, 2), (10, 20), [30, 40]), ((4, 5), (40, 50), [10, 20]), ((3,), (30,), [40])],
    ids=["first group", "last group", "one row"],
)
def test_the_rows_behind_the_own_slot_are_kept(own, left, behind):
    assert left_by(rows(*own), rows(*left)).hidden_states.flatten().tolist() == behind


def test_rows_that_were_summed_on_their_way_back_stay():
    summed = rows(7, 8)
    assert left_by(rows(1, 2), summed).hidden_states is summed


def test_an_idle_rank_has_no_slot():
    none = rows()
    assert left_by(none, none).hidden_states is none


@dataclass(frozen=True)
class Plan:
    sync: SyncPlan


def plan_of(layout, tokens):
    options = SyncOptions()
    return Plan(sync=sync_plan(layout, tokens, a2a=True, extend=True, options=options))


def test_equal_rows_are_dispatched_by_every_rank_of_the_group():
    plan = plan_of(ParallelLayout(attn_dp=1, attn_tp=2, ep=2), (3,))
    sync = replicated_rows_dispatched(plan, {}, 0).sync
    assert (sync.gather, sync.returning) == (Gather.NONE, Return.NONE)
    assert sync.layer == ((0, 1, 2), (0, 1, 2))


def test_rows_that_one_rank_alone_holds_are_dispatched_once():
    plan = plan_of(ParallelLayout(attn_dp=2, ep=2), (3, 1))
    assert replicated_rows_dispatched(plan, {}, 0) is plan
