"""One rank's glue on a loopback world: where rows go, who writes, what comes back."""

import pytest
import torch
from torch import Tensor

from moe.glue import FP8_WIRE, Glue
from moe.quant.fp8 import dequantize_groups
from topology.collectives import CollectiveMismatchError, Collectives, ForwardingCollectives
from topology.layout import ParallelLayout
from topology.loopback import LoopbackWorld, RankError
from topology.sync import Padding, SyncOptions, SyncPlan, sync_plan

DP2 = ParallelLayout(attn_dp=2, ep=2)
DP2_TP_MOE = ParallelLayout(attn_dp=2, ep=1, moe_tp=2)
DP2_TP2 = ParallelLayout(attn_dp=2, attn_tp=2, ep=4)
TP2 = ParallelLayout(attn_dp=1, attn_tp=2, ep=2)
CP2 = ParallelLayout(attn_dp=1, cp=2, ep=2)
MAX_LEN, SUM_LEN = {"padding": Padding.MAX_LEN}, {"padding": Padding.SUM_LEN}


def plan_of(layout, tokens, *, a2a=False, **options) -> SyncPlan:
    return sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions(**options))


def numbered(rows) -> Tensor:
    """[T, 2] bf16 that name their token; padding rows are -1."""
    return torch.tensor([[float(row), -float(row)] for row in rows]).to(torch.bfloat16).view(-1, 2)


def tokens_of(rows: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in rows[:, 0].tolist())


ROUTES = {
    "none": (TP2, [3], {}),
    "tensor-split": (TP2, [3], {"a2a": True}),
    "tensor-split-empty-chunk": (TP2, [1], {"a2a": True}),
    "all-gather": (DP2, [3, 1], MAX_LEN),
    "all-gather-v": (DP2, [3, 1], SUM_LEN),
    "all-gather-v-idle": (DP2, [3, 0], SUM_LEN),
    "all-reduce": (DP2_TP_MOE, [3, 1], SUM_LEN),
    "all-reduce-attn-tp": (DP2_TP2, [3, 1], SUM_LEN),
    "all-reduce-idle": (DP2_TP2, [0, 3], SUM_LEN),
    "reduce-scatter-all-gather": (DP2_TP2, [3, 1], MAX_LEN),
    "cp-zigzag": (CP2, [6], {}),
    "cp-contiguous": (CP2, [5], {"zigzag": False}),
    "nobody": (DP2_TP2, [0, 0], MAX_LEN),
}


def entered(layout, plan):
    def program(verbs):
        rows = numbered(plan.entry[verbs.rank])
        ids = torch.tensor(plan.entry[verbs.rank], dtype=torch.int64)
        return Glue(plan, layout, verbs).enter(rows, ids)

    return LoopbackWorld(layout.world_size).run(program)


@pytest.mark.parametrize(("layout", "tokens", "chosen"), ROUTES.values(), ids=ROUTES)
def test_every_rank_gets_the_rows_that_the_plan_says(layout, tokens, chosen):
    plan = plan_of(layout, tokens, **chosen)
    assert tuple(tokens_of(x.hidden_states) for x in entered(layout, plan)) == plan.layer


@pytest.mark.parametrize(("layout", "tokens", "chosen"), ROUTES.values(), ids=ROUTES)
def test_input_ids_stay_beside_their_rows(layout, tokens, chosen):
    plan = plan_of(layout, tokens, **chosen)
    ids = [x.input_ids for x in entered(layout, plan)]
    assert [tuple(rank.tolist()) for rank in ids] == list(plan.layer)
    assert {rank.dtype for rank in ids} == {torch.int64}


def test_without_input_ids_none_come_out():
    plan = plan_of(DP2, [2, 1])
    results = LoopbackWorld(2).run(
        lambda verbs: Glue(plan, DP2, verbs).enter(numbered(plan.entry[verbs.rank])).input_ids
    )
    assert results == [None, None]


class Seen(ForwardingCollectives):
    """Keeps what was handed to each verb."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.sent: list[tuple[str, Tensor]] = []

    def watching(self, op, rows, group):
        self.sent.append((op, rows.clone()))
        return super().watching(op, rows, group)


def first_sent(plan: SyncPlan, layout: ParallelLayout) -> list[tuple[str, tuple[int, ...]]]:
    def program(verbs):
        seen = Seen(verbs)
        Glue(plan, layout, seen).enter(numbered(plan.entry[verbs.rank]))
        op, rows = seen.sent[0]
        return op, tokens_of(rows)

    return LoopbackWorld(layout.world_size).run(program)


def test_attention_tp_rank_0_alone_writes_its_slot():
    plan = plan_of(DP2_TP2, [1, 2], **SUM_LEN)
    assert first_sent(plan, DP2_TP2) == [
        ("all_reduce", (0, -1, 0, 0)),
        ("all_reduce", (0, 0, 0, 0)),
        ("all_reduce", (0, 0, 1, 2)),
        ("all_reduce", (0, 0, 0, 0)),
    ]


def test_attention_tp_ranks_after_the_first_give_zeros_to_the_scatter():
    plan = plan_of(DP2_TP2, [1, 2], **MAX_LEN)
    assert first_sent(plan, DP2_TP2) == [
        ("reduce_scatter_v", (0, -1)),
        ("reduce_scatter_v", (0, 0)),
        ("reduce_scatter_v", (1, 2)),
        ("reduce_scatter_v", (0, 0)),
    ]


@pytest.mark.parametrize(("layout", "tokens", "chosen"), ROUTES.values(), ids=ROUTES)
def test_the_given_rows_are_not_written_to(layout, tokens, chosen):
    plan = plan_of(layout, tokens, **chosen)

    def program(verbs):
        rows = numbered(plan.entry[verbs.rank])
        ids = torch.tensor(plan.entry[verbs.rank], dtype=torch.int64)
        Glue(plan, layout, verbs).enter(rows, ids)
        return rows._version, ids._version

    assert LoopbackWorld(layout.world_size).run(program) == [(0, 0)] * layout.world_size


@pytest.mark.parametrize(
    ("name", "expected"),
    [("all-gather-v", True), ("all-reduce", False), ("reduce-scatter-all-gather", False)],
)
def test_minus_zero_loses_its_sign_where_zeros_are_added(name, expected):
    layout, tokens, chosen = ROUTES[name]
    plan = plan_of(layout, tokens, **chosen)
    token_0 = entered(layout, plan)[-1].hidden_states[0]
    assert token_0.signbit().tolist() == [False, expected]


RETURNS = {
    **ROUTES,
    "dp-scatter-max": (DP2_TP2, [3, 1], MAX_LEN),
    "reduce-scatter": (DP2_TP_MOE, [3, 1], {**MAX_LEN, "reduce_scatter": True}),
    "reduce-scatter-v-by-flag": (DP2_TP_MOE, [3, 1], {**SUM_LEN, "gatherv": True}),
}


def left(layout: ParallelLayout, plan: SyncPlan, summand) -> list[tuple[int, ...]]:
    """Tokens of the rows each rank gets back when it leaves with ``summand(rank, layer rows)``."""

    def program(verbs):
        rows = numbered(plan.layer[verbs.rank])
        return tokens_of(Glue(plan, layout, verbs).leave(summand(verbs.rank, rows)))

    return LoopbackWorld(layout.world_size).run(program)


@pytest.mark.parametrize(("layout", "tokens", "chosen"), RETURNS.values(), ids=RETURNS)
def test_every_rank_gets_its_entry_rows_back(layout, tokens, chosen):
    plan = plan_of(layout, tokens, **chosen)
    reduces_here = plan.reducer == "glue_out"
    last = layout.world_size - 1
    returned = left(
        layout, plan, lambda rank, rows: rows * (rank == last) if reduces_here else rows
    )
    assert tuple(returned) == plan.entry


@pytest.mark.parametrize("name", ["all-gather-v", "all-gather", "cp-zigzag", "reduce-scatter"])
def test_a_reducing_return_adds_one_summand_of_each_rank(name):
    layout, tokens, chosen = RETURNS[name]
    plan = plan_of(layout, tokens, **chosen)
    factors = (1, 10)
    returned = left(layout, plan, lambda rank, rows: rows * factors[rank])
    assert tuple(returned) == tuple(tuple(11 * row for row in rows) for rows in plan.entry)


def test_dp_scatter_hands_out_rows_of_its_own():
    plan = plan_of(DP2_TP_MOE, [2, 1])

    def program(verbs):
        rows = numbered(plan.layer[verbs.rank])
        Glue(plan, DP2_TP_MOE, verbs).leave(rows).fill_(7)
        return tokens_of(rows)

    assert LoopbackWorld(2).run(program) == [(0, 1, 2)] * 2


@pytest.mark.parametrize(
    ("step", "message"),
    [("enter", "glue_in: 4 rows where 2 were"), ("leave", "glue_out: 4 rows where 3 were")],
)
def test_rows_that_the_plan_does_not_have_are_refused(step, message):
    plan = plan_of(DP2_TP_MOE, [2, 1])
    with pytest.raises(RankError) as error:
        LoopbackWorld(2).run(
            lambda verbs: getattr(Glue(plan, DP2_TP_MOE, verbs), step)(numbered(range(4)))
        )
    with pytest.raises(CollectiveMismatchError, match=message):
        raise error.value.cause


def wide(rows) -> Tensor:
    """[T, 256] bf16, of which fp8 keeps no row."""
    columns = torch.arange(1, 257) / 37
    return (torch.tensor(rows)[:, None] + columns).to(torch.bfloat16)


def quantised(layout, plan):
    def program(verbs):
        return Glue(plan, layout, verbs, FP8_WIRE).enter(wide(plan.entry[verbs.rank]))

    return LoopbackWorld(layout.world_size).run(program)


def test_an_fp8_gather_keeps_what_each_rank_sent():
    plan = plan_of(DP2, [2, 1])
    sent = [(x.wire.shape, x.wire.dtype, x.wire_scale.shape) for x in quantised(DP2, plan)]
    assert sent == [((n, 256), torch.float8_e4m3fn, (n, 2)) for n in (2, 1)]


def test_an_fp8_gather_gives_all_ranks_the_rounded_rows():
    plan = plan_of(DP2, [2, 1])
    outputs = quantised(DP2, plan)
    parts = [dequantize_groups(x.wire, x.wire_scale).to(torch.bfloat16) for x in outputs]
    assert all(torch.equal(x.hidden_states, torch.cat(parts)) for x in outputs)


def test_an_fp8_gather_loses_bits_within_a_last_place_of_e4m3():
    plan = plan_of(DP2, [2, 1])
    exact, got = wide((0, 1, 2)).double(), quantised(DP2, plan)[0].hidden_states.double()
    error = (got - exact).abs()
    # Half a last place of three mantissa bits, then of the eight of bf16.
    assert error.max() > 0
    assert bool((error <= exact * (2.0**-4 + 2.0**-8)).all())


def test_a_gather_of_another_kind_does_not_use_the_wire():
    plan = plan_of(DP2, [2, 1], **MAX_LEN)
    outputs = quantised(DP2, plan)
    assert all(x.wire is None and x.wire_scale is None for x in outputs)
    assert torch.equal(outputs[0].hidden_states, wide(plan.layer[0]))
