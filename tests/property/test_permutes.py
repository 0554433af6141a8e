"""Laws of every dispatcher's form that hold for every routing, from dispatch to combine."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF
from moe.formats import GemmLayout, RunnerBackend, ScaleFormat
from moe.permute import PERMUTES, permute_pair
from moe.poison import Fill
from moe.stages import PhysicalIds, PrePermuteOutput
from tests.property.batches import EDGES, Batch, batches
from tests.property.forms import FORMS, Arrival, Form, Site
from tests.property.pipeline import (
    RankRun,
    digits_of,
    forward,
    hidden_of,
    home,
    identity,
    live_rows,
    number_of,
    scaled,
    weights_of,
)
from topology.loopback import LoopbackWorld, RankError

FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
EDGE = pytest.mark.parametrize("batch", EDGES.values(), ids=EDGES.keys())


def drawn(test: Callable[..., None]) -> Callable[..., None]:
    """On batches of up to four ranks, with as many slots as every combine can add."""
    return settings(max_examples=8)(given(batch=batches(max_ranks=4, top_ks=(1, 2, 4)))(test))


def test_there_is_a_form_for_every_permute():
    used = {permute_pair(form.dispatch_format, RunnerBackend.DEEP_GEMM) for form in FORMS.values()}
    assert used == set(PERMUTES.values())


def routes_of(form: Form, batch: Batch, rank: int) -> Counter[tuple[int, int]]:
    """(local expert, token) of every route that a rank has to compute; token -1 is a dummy."""
    sent = list(enumerate(batch.all_tokens))
    if form.sends_dummies:
        sent += [(-1, tuple(range(batch.top_k)))] * batch.counts.count(0)
    return Counter((slot, number) for number, ids in sent for slot in batch.local_slots(ids, rank))


def halves(number: int, top_k: int) -> Tensor:
    """[K] fp32 powers of two, in another order for each token."""
    return torch.tensor([2.0 ** -((slot + number) % top_k) for slot in range(top_k)])


def exact(form: Form, batch: Batch) -> list[RankRun]:
    """A forward in which every sum is exact and every row says whose it is."""
    return forward(batch, identity, form=form, hidden=digits_of, weights=halves)


exact_at_edge = cache(exact)


def check_each_expert_has_its_routes_rows(form: Form, batch: Batch, runs: list[RankRun]) -> None:
    for rank, run in enumerate(runs):
        rows = run.grouped.rows.hidden_states.flatten(0, -2)
        found = Counter((expert, number_of(rows[row])) for expert, row in live_rows(run.grouped))
        assert found == routes_of(form, batch, rank)


@FORM
@drawn
def test_each_expert_has_the_rows_of_its_routes_and_no_other(form, batch):
    check_each_expert_has_its_routes_rows(form, batch, exact(form, batch))


@FORM
@EDGE
def test_at_an_edge_each_expert_has_the_rows_of_its_routes(form, batch):
    check_each_expert_has_its_routes_rows(form, batch, exact_at_edge(form, batch))


@FORM
@drawn
def test_a_token_arrives_as_often_as_the_form_says(form, batch):
    for rank, run in enumerate(forward(batch, identity, form=form, hidden=digits_of)):
        arrived = Counter(map(number_of, received_rows(run.sent)))
        expected = Counter()
        for number, token in enumerate(batch.all_tokens):
            routes = len(batch.local_slots(token, rank))
            times = {Arrival.ALWAYS: 1, Arrival.BY_RANK: min(routes, 1), Arrival.BY_ROUTE: routes}
            expected[number] += times[form.arrival]
        assert arrived == +expected


def received_rows(sent) -> Tensor:
    """[N, 4] rows that came in, but for a dummy's and for what a buffer holds besides."""
    rows = sent.hidden_states.flatten(0, -2)
    return rows[rows[:, 3] == 1]


@FORM
@drawn
def test_exactly_the_rows_of_routes_have_an_index_and_each_its_own(form, batch):
    for rank, run in enumerate(forward(batch, identity, form=form)):
        index = getattr(run.grouped.restore, "output_index", None)
        if index is not None:
            rows = index[index >= 0]
            assert sorted(rows.tolist()) == sorted(row for _, row in live_rows(run.grouped))
            assert rows.numel() == routes_of(form, batch, rank).total()


def value_of(fill: Fill, dtype: torch.dtype) -> float:
    """What poison is, in codes for e4m3."""
    if dtype == torch.float8_e4m3fn:
        return {Fill.NAN: 0x7F, Fill.LARGE: 0x7E}[fill]
    if dtype == torch.int32:
        return {Fill.NAN: 2**31 - 1, Fill.LARGE: -(2**31)}[fill]
    bits = {torch.bfloat16: 8, torch.float32: 24}[dtype]
    return {Fill.NAN: float("nan"), Fill.LARGE: 2.0**127 * (1 - 2.0**-bits)}[fill]


def padding_values(grouped: PrePermuteOutput, tensor: Tensor) -> Tensor:
    """[N] every value that rows of no route hold, codes for e4m3."""
    rows = tensor.flatten(0, -2)
    if rows.dtype == torch.float8_e4m3fn:
        rows = rows.view(torch.uint8)
    is_padding = torch.ones(len(rows), dtype=torch.bool)
    is_padding[[row for _, row in live_rows(grouped)]] = False
    return rows[is_padding].flatten()


@FORM
@settings(max_examples=12)
@given(
    batch=batches(max_ranks=3, top_ks=(1, 2, 4)),
    fill=st.sampled_from(Fill),
    scale_format=st.sampled_from(ScaleFormat),
)
def test_every_row_of_padding_is_poison(form, batch, fill, scale_format):
    """But for packed scales of segments, which are scattered into zeros."""
    runs = forward(batch, not_computed, form=form, scale_format=scale_format, fill=fill)
    for run in runs:
        rows = run.grouped.rows
        found = padding_values(run.grouped, rows.hidden_states)
        poison = torch.full_like(found, value_of(fill, rows.hidden_states.dtype))
        assert torch.equal(found.nan_to_num(1), poison.nan_to_num(1))
        scale = rows.hidden_states_scale
        if scale is not None:
            found = padding_values(run.grouped, scale)
            value = value_of(fill, scale.dtype)
            if scatters_scales(form) and scale.dtype == torch.int32:
                value = 0
            assert torch.equal(found.nan_to_num(1), torch.full_like(found, value).nan_to_num(1))


def scatters_scales(form: Form) -> bool:
    """Into segments; those of expanded rows stay in their buffer."""
    return form.layout is GemmLayout.CONTIG and form.arrival is not Arrival.BY_ROUTE


def not_computed(grouped: PrePermuteOutput, held: range) -> Tensor:
    """[M, H] or [L, S, H] bf16 zeros."""
    return torch.zeros(grouped.rows.hidden_states.shape, dtype=torch.bfloat16)


@FORM
@drawn
def test_with_weight_one_on_one_slot_a_token_comes_back_bitwise(form, batch):
    """Slot by slot in turn; zero, if the slot is dropped."""

    def one_hot(number: int, top_k: int) -> Tensor:
        return torch.eye(top_k)[number % top_k]

    routed = home(form, forward(batch, identity, form=form, weights=one_hot))
    for number, token in enumerate(batch.all_tokens):
        is_there = token[number % batch.top_k] >= 0
        assert torch.equal(routed[number], hidden_of(number) * is_there)


def check_sums_of_halves(form: Form, batch: Batch, runs: list[RankRun]) -> None:
    expected = [
        [digit * total for digit in digits_of(number).tolist()]
        for number, total in enumerate(sums_of_weights(batch, halves))
    ]
    assert home(form, runs).tolist() == expected


def sums_of_weights(batch: Batch, weights: Callable[[int, int], Tensor]) -> list[float]:
    """Of each token's slots that are not dropped."""
    sums = []
    for number, token in enumerate(batch.all_tokens):
        of_slots = zip(weights(number, batch.top_k).tolist(), token, strict=True)
        sums.append(sum(weight for weight, expert in of_slots if expert >= 0))
    return sums


@FORM
@drawn
def test_identity_experts_give_back_a_token_times_its_weights_exactly(form, batch):
    check_sums_of_halves(form, batch, exact(form, batch))


@FORM
@EDGE
def test_at_an_edge_a_token_comes_back_times_its_weights(form, batch):
    check_sums_of_halves(form, batch, exact_at_edge(form, batch))


@FORM
@drawn
def test_any_weights_give_back_a_token_times_them_up_to_roundings(form, batch):
    routed = home(form, forward(batch, identity, form=form)).to(torch.float64)
    for number, total in enumerate(sums_of_weights(batch, weights_of)):
        expected = hidden_of(number).to(torch.float64) * total
        band = (form.roundings + 0.1) * BF16_ROUNDOFF * expected.abs()
        assert bool(((routed[number] - expected).abs() <= band).all())


@FORM
@drawn
def test_the_order_of_arrivals_and_slots_changes_no_bit(form, batch):
    first, second = (home(form, forward(batch, scaled, form=form, seed=seed)) for seed in (1, 2))
    assert torch.equal(first, second)


@FORM
def test_two_seeds_give_two_orders(form):
    tokens = tuple((token % 4,) for token in range(64))
    first, second = (
        forward(Batch(4, 1, (tokens,)), identity, form=form, hidden=digits_of, seed=seed)[0]
        for seed in (1, 2)
    )
    rows = [run.grouped.rows.hidden_states.flatten(0, -2) for run in (first, second)]
    assert not torch.equal(rows[0][:16], rows[1][:16])


CAPPED = pytest.mark.parametrize("form", ["deepep_ll", "deepep_v2", "deepep_v2_expanded"])
CAPACITY = 8


def dispatched(form: str, num_tokens: int) -> int:
    """Rows that a rank has sent, beside an idle one."""

    def program(verbs) -> int:
        counts = (num_tokens, 0)
        site = Site(verbs=verbs, num_local=2, top_k=1, counts=counts, capacity=CAPACITY)
        rows = torch.ones(counts[verbs.rank], 4, dtype=torch.bfloat16)
        ids = torch.full((len(rows), 1), 3, dtype=torch.int32)
        sent = FORMS[form].dispatcher(site).dispatch(rows, PhysicalIds(ids), ids.float())
        return len(sent.physical_ids)

    return LoopbackWorld(2).run(program)[0]


@CAPPED
def test_a_rank_may_send_as_many_rows_as_its_buffers_take(form):
    assert dispatched(form, CAPACITY) == CAPACITY


@CAPPED
def test_one_row_more_is_refused_with_the_field_that_raises_the_limit(form):
    with pytest.raises(RankError, match=r"moe\.switches\.max_dispatch_tokens_per_rank") as caught:
        dispatched(form, CAPACITY + 1)
    assert isinstance(caught.value.cause, ValueError)
