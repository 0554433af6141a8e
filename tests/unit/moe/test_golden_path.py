"""Each place where ranks store bf16, one by one, on numbers that show the rounding.

2^-8 is half a step of bf16 above 1: 1 + 2^-8 is stored as 1, 1 + 2^-7 as it is.
"""

import pytest
import torch

from moe.formats import GatedActivation, GemmLayout, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import (
    GoldenModel,
    GoldenRouting,
    GoldenTrace,
    RoundingPath,
    SharedInSum,
    golden_forward,
)

HALF, STEP = 2.0**-8, 2.0**-7
GATE, UP = 32.0, 2.0**-5
"""silu(32) is 32 to 13 digits, so the activation is 1 in every column."""


class OneColumn:
    """Hidden size 1, activations of 1: an expert's output is the sum of its row of w2."""

    correction_bias = None

    def __init__(self, experts: list[list[float]], shared: list[float] | None = None):
        self.w2, self.shared_w2 = experts, shared
        self.gate_weight = torch.zeros(len(experts), 1, dtype=torch.float64)
        self.intermediate_size = len(experts[0])

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pair(self.w2[expert])

    def shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.shared_w2 is None else self._pair(self.shared_w2)

    def _pair(self, w2: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        w13 = torch.tensor([GATE, UP], dtype=torch.float64).repeat_interleave(len(w2))
        return w13[:, None], torch.tensor([w2], dtype=torch.float64)


def forward(
    path: RoundingPath,
    weights: OneColumn,
    *,
    factor: float = 1.0,
    ids: list[int] | None = None,
    ep_ranks: list[int] | None = None,
    rounding: bool = True,
) -> GoldenTrace:
    """One token through all experts, or through ``ids``, each of weight 1."""
    ids = list(range(len(weights.w2))) if ids is None else ids
    model = GoldenModel(
        routing=GoldenRouting(
            top_k=len(ids), scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=False
        ),
        routed_scaling_factor=factor,
        activation=GatedActivation(),
        recipe=QuantRecipe.BF16,
        scale_format=ScaleFormat.NONE,
        path=path,
    )
    return golden_forward(
        model,
        weights,
        torch.ones(1, 1),
        rounding=rounding,
        topk_ids=torch.tensor([ids]),
        topk_weights=torch.ones(1, len(ids)),
        ep_ranks=None if ep_ranks is None else torch.tensor([ep_ranks]),
    )


@pytest.mark.parametrize(
    ("moe_tp", "expected"),
    [(1, 1 + STEP), (2, 1.0), (4, 1 + STEP)],
    ids=["whole", "halves", "quarters"],
)
def test_every_shard_stores_its_output(moe_tp, expected):
    # Halves: 1 + 2^-8 is stored as 1, and the other half's 2^-8 is lost in the sum. Quarters
    # store nothing that is rounded.
    path = RoundingPath(moe_tp=moe_tp, folds_factor=True)
    assert forward(path, OneColumn([[1.0, HALF, HALF, 0.0]])).output.item() == expected


def test_a_sharded_experts_output_is_the_sum_of_what_the_shards_stored():
    path = RoundingPath(moe_tp=2, folds_factor=True)
    trace = forward(path, OneColumn([[1.0, HALF, HALF, 0.0]]))
    assert trace.expert_output.tolist() == [[[1.0 + HALF]]]


@pytest.mark.parametrize(
    ("folds_factor", "routed", "output"),
    [(True, 3.015625, 3.015625), (False, 1.0, 3.0)],
    ids=["in_the_partial", "in_the_tail"],
)
def test_the_factor_acts_before_or_after_the_partial_is_stored(folds_factor, routed, output):
    # 3 * (1 + 2^-8) is 3.01171875, stored as 3.015625.
    path = RoundingPath(folds_factor=folds_factor)
    trace = forward(path, OneColumn([[1.0], [HALF]]), factor=3.0)
    assert (trace.routed.item(), trace.output.item()) == (routed, output)


@pytest.mark.parametrize(
    ("scales_stored_sum", "expected"), [(False, 3.015625), (True, 3.0)], ids=["once", "twice"]
)
def test_a_sum_may_be_stored_before_the_factor_multiplies_it(scales_stored_sum, expected):
    # 1 + 2^-8 is stored as 1; 3 * (1 + 2^-8) as 3.015625.
    path = RoundingPath(folds_factor=True, scales_stored_sum=scales_stored_sum)
    assert forward(path, OneColumn([[1.0], [HALF]]), factor=3.0).output.item() == expected


def test_the_product_with_a_stored_sum_is_stored_again():
    # 1.5 * (1 + 2^-7) is halfway between 1.5078125 and 1.515625.
    path = RoundingPath(folds_factor=True, scales_stored_sum=True)
    trace = forward(path, OneColumn([[1.0], [STEP]]), factor=1.5)
    assert trace.routed.item() == 1.515625


@pytest.mark.parametrize(
    ("expert_rank", "expected"),
    [((0, 0, 0), 1 + STEP), ((0, 1, 1), 1 + STEP), ((0, 0, 1), 1.0)],
    ids=["together", "small_ones_together", "large_with_small"],
)
@pytest.mark.parametrize("folds_factor", [False, True])
def test_every_rank_stores_its_partial(expert_rank, expected, folds_factor):
    path = RoundingPath(ep_size=2, expert_rank=expert_rank, folds_factor=folds_factor)
    assert forward(path, OneColumn([[1.0], [HALF], [HALF]])).output.item() == expected


def test_experts_are_in_equal_blocks_unless_told_otherwise():
    blocks = RoundingPath(ep_size=2, folds_factor=True)
    weights = OneColumn([[1.0], [HALF], [HALF], [0.0]])
    assert forward(blocks, weights).output.item() == 1.0


def test_replicas_are_summed_where_they_are_computed():
    weights = OneColumn([[1.0], [HALF], [HALF], [0.0]])
    path = RoundingPath(ep_size=2, folds_factor=True)
    moved = forward(path, weights, ep_ranks=[0, 1, 1, 0])
    assert moved.output.item() == 1 + STEP


@pytest.mark.parametrize("folds_factor", [False, True])
def test_the_sum_over_ranks_is_stored_before_the_shared_expert_is_added(folds_factor):
    # Were it not, 1 + 2^-8 + 2^-8 would be 1 + 2^-7.
    path = RoundingPath(ep_size=2, folds_factor=folds_factor)
    assert forward(path, OneColumn([[1.0], [HALF]], shared=[HALF])).output.item() == 1.0


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        (SharedInSum.SHARDED, 1 + STEP),
        (SharedInSum.FIRST_RANK, 1 + 2 * STEP),
        (SharedInSum.ABSENT, 1 + 2 * STEP),
    ],
)
def test_a_rank_stores_its_partial_with_its_part_of_the_shared_expert(shared, expected):
    # Sharded, rank 1 has all of it: 2^-8 + 1 is stored as 1, and 2^-7 of rank 0 is added.
    # Otherwise 1 + 2^-7 + 2^-8 is summed at last, a tie that goes to 1 + 2^-6.
    path = RoundingPath(ep_size=2, folds_factor=True, shared=shared)
    weights = OneColumn([[STEP], [HALF]], shared=[0.0, 1.0])
    assert forward(path, weights).output.item() == expected


@pytest.mark.parametrize(
    ("shared", "expected"), [(SharedInSum.FIRST_RANK, 1.0), (SharedInSum.ABSENT, 1 + STEP)]
)
def test_the_first_rank_stores_its_partial_with_all_of_the_shared_expert(shared, expected):
    # 2^-8 + 1 is stored as 1; the other rank's 2^-8 is then lost, too.
    path = RoundingPath(ep_size=2, folds_factor=True, shared=shared)
    weights = OneColumn([[HALF], [HALF]], shared=[1.0, 0.0])
    assert forward(path, weights).output.item() == expected


@pytest.mark.parametrize(
    ("shared", "output", "traced"),
    [(SharedInSum.SHARDED, 1.0, 1 + HALF), (SharedInSum.FIRST_RANK, 1 + STEP, 1 + STEP)],
)
def test_every_shard_of_the_shared_expert_stores_its_output(shared, output, traced):
    path = RoundingPath(ep_size=2, folds_factor=True, shared=shared)
    weights = OneColumn([[0.0], [0.0]], shared=[1.0, HALF, HALF, 0.0])
    trace = forward(path, weights)
    assert (trace.output.item(), trace.shared.item()) == (output, traced)


@pytest.mark.parametrize("shared", list(SharedInSum))
def test_ranks_without_a_route_give_their_part_of_the_shared_expert(shared):
    path = RoundingPath(ep_size=2, moe_tp=2, folds_factor=True, shared=shared)
    weights = OneColumn([[9.0, 9.0], [9.0, 9.0]], shared=[1.0, 2.0, 4.0, 8.0])
    trace = forward(path, weights, ids=[-1, -1])
    assert (trace.output.item(), trace.routed.item(), trace.shared.item()) == (15.0, 0.0, 15.0)


def test_rank_and_shard_count_the_ranks_of_the_world():
    # Four ranks; only EP rank 1 has a route: its shards are ranks 2 and 3. Rank 3's 2^-8 meets
    # the 1 of shared shard 3 and is lost; rank 2's 2^-7 is not.
    path = RoundingPath(ep_size=2, moe_tp=2, folds_factor=True, shared=SharedInSum.SHARDED)
    weights = OneColumn([[0.0, 0.0], [STEP, HALF]], shared=[0.0, 0.0, 0.0, 1.0])
    assert forward(path, weights).output.item() == 1 + STEP


def test_a_path_that_folds_the_factor_traces_the_ranks_sum_as_it_is():
    path = RoundingPath(ep_size=2, folds_factor=True)
    assert forward(path, OneColumn([[1.0], [HALF]])).routed.item() == 1 + HALF


PATHS = {
    "all_to_all": RoundingPath(ep_size=2),
    "ep": RoundingPath(ep_size=4, folds_factor=True),
    "moe_tp": RoundingPath(moe_tp=4, folds_factor=True, shared=SharedInSum.SHARDED),
    "ep_x_tp": RoundingPath(ep_size=2, moe_tp=2, folds_factor=True, shared=SharedInSum.FIRST_RANK),
    "masked": RoundingPath(folds_factor=True, layout=GemmLayout.MASKED),
    "stored_sum": RoundingPath(folds_factor=True, scales_stored_sum=True),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("name", ["activation", "expert_output", "shared", "output"])
def test_ideal_ignores_the_path(path, name):
    weights = OneColumn([[0.3, 0.1, 0.7, 0.9]] * 4, shared=[0.11, 0.13, 0.17, 0.19])
    plain = forward(RoundingPath(), weights, factor=1.7, rounding=False)
    spread = forward(path, weights, factor=1.7, rounding=False, ep_ranks=[0, 0, 0, 0])
    assert torch.equal(getattr(spread, name), getattr(plain, name))


def test_ideal_routed_has_the_factor_where_the_path_folds_it_in():
    weights = OneColumn([[1.0]])
    folded, plain = (
        forward(RoundingPath(folds_factor=folds), weights, factor=3.0, rounding=False)
        for folds in (True, False)
    )
    assert folded.routed.item() == 3.0 * plain.routed.item()


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({"ep_size": 2, "expert_rank": (0, 2)}, "expert_rank names rank 2 of 2"),
        ({"expert_rank": (0, -1)}, "expert_rank names rank -1 of 1"),
        ({"scales_stored_sum": True}, "no factor multiplies a rank's stored sum"),
        ({"shared": SharedInSum.SHARDED}, "would be scaled by the tail"),
        ({"shared": SharedInSum.FIRST_RANK}, "would be scaled by the tail"),
    ],
    ids=[
        "rank_too_high",
        "negative_rank",
        "stored_sum_without_factor",
        "sharded_without_factor",
        "first_rank_without_factor",
    ],
)
def test_a_path_that_cannot_be_is_refused(broken, match):
    with pytest.raises(ValueError, match=match):
        RoundingPath(**broken)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (RoundingPath(expert_rank=(0,)), "expert_rank names 1 of 2 experts"),
        (RoundingPath(ep_size=3), "2 experts do not divide among 3 ranks"),
        (RoundingPath(moe_tp=3), "an intermediate size of 4 does not divide by 3"),
    ],
    ids=["missed_expert", "uneven_blocks", "uneven_shards"],
)
def test_a_path_that_does_not_fit_the_weights_is_refused(path, match):
    with pytest.raises(ValueError, match=match):
        forward(path, OneColumn([[1.0] * 4] * 2))
