"""Arming: names, parameters and ranks are settled or refused with what there is."""

import pickle
import re

import pytest

from moe.faults import FAULTS, ArmedFault, UnknownFaultError, arm
from moe.formats import Stage

TOKENS = (4, 0, 2, 7)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_armed_with_its_defaults(name):
    armed = arm(name, {}, TOKENS)
    assert armed.name == name
    assert armed.fault is FAULTS[name]
    assert armed.stage is FAULTS[name].stage
    assert dict(armed.params) == dict(FAULTS[name].params)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_says_what_it_is_and_where_it_was_seen(name):
    fault = FAULTS[name]
    assert fault.about
    assert fault.origin
    assert not fault.about.endswith(".")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tokens_swaped", "did you mean 'tokens_swapped'?"),
        ("topk_weight_twice", "did you mean 'topk_weights_twice'?"),
        ("rank_raise", "did you mean 'rank_raises'?"),
    ],
)
def test_an_unknown_fault_gets_the_nearest_name(name, hint):
    with pytest.raises(UnknownFaultError, match=re.escape(f"no fault {name!r}")) as caught:
        arm(name, {}, TOKENS)
    assert hint in str(caught.value)


def test_a_name_near_to_nothing_gets_the_list():
    with pytest.raises(UnknownFaultError) as caught:
        arm("xyzzy", {}, TOKENS)
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in FAULTS)


def test_an_unknown_parameter_gets_the_nearest_name():
    with pytest.raises(UnknownFaultError, match="no parameter of tokens_swapped 'rwo'") as caught:
        arm("tokens_swapped", {"rwo": 1}, TOKENS)
    assert "did you mean 'row'?" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("tokens_swapped", {"row": "first"}, "row='first' is no int like its default 0"),
        ("tokens_swapped", {"row": 1.0}, "row=1.0 is no int"),
        ("tokens_swapped", {"row": True}, "row=True is no int"),
        ("tokens_swapped", {"row": [1]}, "row=[1] is no single number"),
        ("tokens_swapped", {"row": None}, "row=None is no single number"),
        ("checker_blinded", {"check": 3}, "check=3 is no str like its default 'band'"),
        ("rank_raises", {"stage": "gemm3"}, "stage='gemm3' is not one of weights, glue_in"),
        ("rank_raises", {"stage": 5}, "stage=5 is not one of"),
        ("collective_skipped", {"op": "broadcast"}, "op='broadcast' is not one of all_gather_v"),
        ("collective_skipped", {"occurrence": -1}, "occurrence=-1 is negative"),
        ("routed_no_clamp", {"limit": -0.5}, "limit=-0.5 is negative"),
        ("routed_no_clamp", {"limit": True}, "limit=True is no float like its default 10.0"),
        ("routed_no_clamp", {"limit": "nan"}, "like its default 10.0; YAML writes .nan"),
        ("routed_no_clamp", {"limit": "Inf"}, "like its default 10.0; YAML writes .inf"),
        ("routed_no_clamp", {"limit": 1e39}, "limit=1e+39 is more than 3.4028234663852886e+38"),
        ("tile_of_next_block", {"tile": 0}, "tile=0 is none: 1 is the least"),
        ("hidden_tail_dropped", {"vector": 0}, "vector=0 is none: 1 is the least"),
        ("row_index_wraps", {"bound": 0}, "bound=0 is none: 1 is the least"),
        ("tokens_swapped", {"row": 2**31}, "row=2147483648 is more than 2147483647"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(name, params, message):
    with pytest.raises(UnknownFaultError, match=re.escape(message)):
        arm(name, params, TOKENS)


@pytest.mark.parametrize("value", [12, 0.5, 0, float("inf"), float("nan")], ids=str)
def test_a_number_is_taken_for_a_float(value):
    limit = arm("routed_no_clamp", {"limit": value}, TOKENS).params["limit"]
    assert (type(limit), str(limit)) == (float, str(float(value)))


@pytest.mark.parametrize(
    ("rank", "ranks"), [("auto", (2,)), ("all", (0, 1, 2, 3)), (0, (0,)), (1, (1,)), (3, (3,))]
)
def test_ranks_are_settled(rank, ranks):
    assert arm("tokens_swapped", {"rank": rank}, TOKENS).ranks == ranks


@pytest.mark.parametrize("rank", [4, -1, "some", 1.0, True], ids=repr)
def test_ranks_that_are_not_there_are_refused(rank):
    with pytest.raises(UnknownFaultError, match="is not 'auto', 'idle', 'all' or a number under 4"):
        arm("tokens_swapped", {"rank": rank}, TOKENS)


@pytest.mark.parametrize(
    ("tokens", "rank"),
    [((4, 2), 1), ((0, 5, 0), 1), ((0, 0, 5, 1), 3), ((0, 0), 0), ((3,), 0)],
    ids=str,
)
def test_auto_is_the_second_busy_rank_or_the_only_one(tokens, rank):
    assert arm("tokens_swapped", {}, tokens).ranks == (rank,)


def test_a_fault_without_a_rank_acts_on_all():
    assert arm("checker_blinded", {}, TOKENS).ranks == (0, 1, 2, 3)


def test_a_stage_that_is_given_overrides_the_catalogue():
    assert arm("rank_raises", {"stage": "combine"}, TOKENS).stage is Stage.COMBINE


@pytest.mark.parametrize("plan", [object(), None], ids=["a plan", "no plan"])
def test_a_fault_of_one_stage_acts_there_under_every_plan(plan):
    assert arm("tokens_swapped", {}, TOKENS).stage_in(plan) is Stage.DISPATCH


def test_an_armed_fault_travels_as_a_plain_value():
    armed = arm("tokens_swapped", {"row": 3}, TOKENS)
    assert pickle.loads(pickle.dumps(armed)) == armed
    assert isinstance(armed, ArmedFault)
