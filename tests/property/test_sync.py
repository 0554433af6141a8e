"""Laws of the glue over generated topologies and token counts: no token is lost or doubled."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.glue import Glue
from topology.collectives import Collectives, RecordingCollectives
from topology.layout import ParallelLayout
from topology.loopback import LoopbackWorld
from topology.sync import PADDING, Padding, Reducer, SyncOptions, SyncPlan, sync_plan
from topology.sync_calls import Carried, DueCall, collective_calls

WIDTH = 2
ROW_BYTES = {Carried.HIDDEN_STATES: WIDTH * 2, Carried.INPUT_IDS: 8}


@dataclass(frozen=True)
class Case:
    """A topology for which a flow is defined, with tokens for it."""

    layout: ParallelLayout
    tokens: tuple[int, ...]
    a2a: bool
    extend: bool = True
    options: SyncOptions = field(default_factory=SyncOptions)

    def plan(self) -> SyncPlan:
        return sync_plan(
            self.layout, self.tokens, a2a=self.a2a, extend=self.extend, options=self.options
        )


def counts(dp: int, world_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Uneven counts, equal ones, one idle group, all but one idle, one token in all."""
    uneven = st.lists(st.integers(0, 9), min_size=dp, max_size=dp).map(tuple)
    equal = st.integers(0, 2 * world_size).map(lambda count: (count,) * dp)
    place, count = st.integers(0, dp - 1), st.integers(1, 9)
    idle = st.tuples(place, count).map(lambda p: tuple(p[1] * (i != p[0]) for i in range(dp)))
    alone = st.tuples(place, count).map(lambda p: tuple(p[1] * (i == p[0]) for i in range(dp)))
    single = place.map(lambda busy: tuple(int(i == busy) for i in range(dp)))
    return st.one_of(uneven, equal, idle, alone, single)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    a2a = draw(st.booleans())
    dp, cp, tp = (draw(st.integers(1, most)) for most in (4, 2, 3))
    if cp > 1 and not a2a:
        dp, cp, tp = 1, draw(st.integers(2, 4)), 1
    world = dp * cp * tp
    ep = draw(st.sampled_from([world] if a2a else [n for n in (1, 2, 3, world) if world % n == 0]))
    layout = ParallelLayout(attn_dp=dp, cp=cp, attn_tp=tp, ep=ep, moe_tp=world // ep)
    paddings = [None, Padding.SUM_LEN, Padding.MAX_LEN] if dp > 1 else [None]
    options = SyncOptions(
        padding=draw(st.sampled_from(paddings)),
        zigzag=draw(st.booleans()),
        gatherv=draw(st.booleans()),
        reduce_scatter=draw(st.booleans()),
    )
    return Case(layout, draw(counts(dp, world)), a2a, draw(st.booleans()), options)


UNEVEN_SHARDS = Case(ParallelLayout(attn_dp=1, attn_tp=4, ep=4), (5,), a2a=True)
EMPTY_SHARDS = Case(ParallelLayout(attn_dp=1, attn_tp=4, ep=4), (1,), a2a=True)
PADDED_SLOTS = Case(
    ParallelLayout(attn_dp=2, attn_tp=3, ep=6),
    (4, 0),
    a2a=False,
    options=SyncOptions(padding=Padding.MAX_LEN),
)
NOBODY = Case(ParallelLayout(attn_dp=3, ep=3), (0, 0, 0), a2a=False)
ZIGZAG = Case(ParallelLayout(attn_dp=1, cp=4, ep=2, moe_tp=2), (9,), a2a=False)


def some_cases(test):
    """Run a law on drawn cases and on those that break most often."""
    for case in (UNEVEN_SHARDS, EMPTY_SHARDS, PADDED_SLOTS, NOBODY, ZIGZAG):
        test = example(case)(test)
    return settings(max_examples=60)(given(cases())(test))


def real(rows) -> list[int]:
    return [row for row in rows if row != PADDING]


@some_cases
def test_the_groups_of_each_axis_partition_the_world(case):
    for mesh in (case.layout.attention, case.layout.moe):
        for axis in mesh.axes:
            assert sorted(chain(*mesh.groups((axis,)))) == list(case.layout.world)


@some_cases
def test_a_token_enters_in_one_group_and_there_once_a_tensor_parallel_rank(case):
    layout, plan, first = case.layout, case.plan(), 0
    for dp_rank, count in enumerate(case.tokens):
        ranks = [r for r in layout.world if layout.attention.coord(r, "dp") == dp_rank]
        entered = Counter(chain(*(real(plan.entry[rank]) for rank in ranks)))
        assert entered == dict.fromkeys(range(first, first + count), layout.attn_tp)
        first += count


@some_cases
def test_tensor_parallel_ranks_hold_the_same_rows(case):
    plan = case.plan()
    for rank in case.layout.world:
        group = case.layout.attention_tp_group(rank)
        assert plan.entry[rank] == plan.entry[group[0]]


@some_cases
def test_a_summed_token_is_in_the_layer_of_every_rank_once(case):
    plan = case.plan()
    if plan.reducer is not Reducer.COMBINE:
        for rows in plan.layer:
            assert sorted(real(rows)) == list(range(sum(case.tokens)))


@some_cases
def test_an_exchanged_token_is_in_the_layer_of_one_rank(case):
    plan = case.plan()
    if plan.reducer is Reducer.COMBINE:
        copies = case.layout.attn_tp if case.layout.cp > 1 else 1
        everywhere = Counter(chain(*map(real, plan.layer)))
        assert everywhere == dict.fromkeys(range(sum(case.tokens)), copies)


@some_cases
def test_a_gathered_row_stands_in_the_slot_of_who_holds_it(case):
    plan, start = case.plan(), 0
    holders = plan.entry[:: case.layout.attn_tp] if plan.slots else ()
    for slot, rows in zip(plan.slots, holders, strict=True):
        assert plan.layer[0][start : start + slot] == rows
        start += slot


def named(rows) -> Tensor:
    """[T, 2] bf16: the token plus one in two digits, so that padding is zero and nothing else."""
    numbers = [divmod(row + 1, 128) for row in rows]
    return torch.tensor(numbers, dtype=torch.bfloat16).view(-1, WIDTH)


def identity_layer(case: Case, plan: SyncPlan, verbs: Collectives) -> Tensor:
    """The layer of identity experts: a token's expert is on one rank, the others give zero."""
    glue = Glue(plan, case.layout, verbs)
    own = plan.entry[verbs.rank]
    x = glue.enter(named(own), torch.tensor(own, dtype=torch.int64))
    assert torch.equal(x.hidden_states, named(plan.layer[verbs.rank]))
    assert tuple(x.input_ids.tolist()) == plan.layer[verbs.rank]
    if plan.reducer is Reducer.COMBINE:
        return glue.leave(x.hidden_states)
    has_expert = (x.input_ids * 7) % case.layout.world_size == verbs.rank
    summand = x.hidden_states * has_expert[:, None]
    if plan.reducer is Reducer.TAIL:
        summand = verbs.all_reduce(summand, case.layout.world)
    return glue.leave(summand)


@some_cases
def test_every_token_comes_back_to_its_owners_once_and_bit_equal(case):
    plan = case.plan()
    returned = LoopbackWorld(case.layout.world_size).run(
        lambda verbs: identity_layer(case, plan, verbs)
    )
    for rank, rows in enumerate(returned):
        assert torch.equal(rows, named(plan.entry[rank]))


@some_cases
def test_the_calls_of_a_forward_are_those_that_the_plan_makes_due(case):
    plan, layout = case.plan(), case.layout

    def program(verbs):
        recording = RecordingCollectives(verbs, str)
        identity_layer(case, plan, recording)
        return [(call.op, call.group, call.payload_bytes) for call in recording.calls]

    def due(call: DueCall):
        return call.op, call.group, call.rows * ROW_BYTES[call.carries]

    made = LoopbackWorld(layout.world_size).run(program)
    for rank, calls in enumerate(made):
        expected = collective_calls(plan, layout, rank, input_ids=True)
        assert calls == list(map(due, expected))
