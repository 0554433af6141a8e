"""Fewer ranks, fewer tokens, smaller sizes: which steps there are, and in which order."""

import pytest

from moe.faults import FAULTS
from scenarios.changes import Change, together, values_of
from scenarios.document import Document
from scenarios.loader import check_document, load_scenario
from scenarios.smaller import fewer_tokens, on_some_rank, sizes, topologies

SMOKE = "scenarios/smoke/ep2_dp.yaml"
FOUR_RANKS = (
    "parallel={world_size: 4, attention: {dp: 4}, moe: {ep: 4}}",
    "batch.tokens=[5, 0, 9, 3]",
)


def load(*sets, injects=()):
    return load_scenario(SMOKE, overrides=sets, injects=injects, known_faults=FAULTS)


def values_in(ladder, key):
    return [change.sets[key] for change in ladder]


def test_the_fewest_ranks_come_first():
    (ladder,) = topologies(load(*FOUR_RANKS))
    worlds = [change.sets["parallel"]["world_size"] for change in ladder]
    assert worlds == sorted(worlds)
    assert set(worlds) == {1, 2}


def test_the_busiest_groups_stay_first_then_the_first_then_the_last():
    (ladder,) = topologies(load(*FOUR_RANKS))
    of_two = [c.sets["batch.tokens"] for c in ladder if c.sets["parallel"]["moe"]["ep"] == 2]
    assert of_two == [[9, 3], [5, 0]]


def test_a_single_rank_leaves_no_topology():
    (ladder,) = topologies(
        load("parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}", "batch.tokens=[5]")
    )
    assert ladder == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens_swapped:rank=3,row=5", "tokens_swapped:rank=auto,row=5"),
        ("tokens_swapped:row=5,rank=1", "tokens_swapped:row=5,rank=1"),
        ("tokens_swapped:rank=all", "tokens_swapped:rank=all"),
        ("tokens_swapped", "tokens_swapped"),
    ],
)
def test_a_fault_of_a_rank_that_went_picks_another(text, expected):
    assert on_some_rank(text, 2) == expected


def test_a_smaller_topology_keeps_faults_on_ranks_that_exist():
    (ladder,) = topologies(load(*FOUR_RANKS, injects=["tokens_swapped:rank=3"]))
    assert {tuple(change.sets["inject"]) for change in ladder} == {("tokens_swapped:rank=auto",)}


def test_all_groups_are_cut_before_single_ones():
    together_, first, second = fewer_tokens(load())
    assert values_in(together_, "batch.tokens") == [[1, 1], [2, 2], [3, 3], [4, 3]]
    assert values_in(first, "batch.tokens") == [[0, 3], [1, 3], [2, 3], [3, 3], [4, 3]]
    assert values_in(second, "batch.tokens") == [[5, 0], [5, 1], [5, 2]]


def test_sizes_start_at_the_smallest():
    top_k, experts, width, hidden = sizes(load())
    assert values_in(top_k, "model.overrides.num_experts_per_tok") == [1, 2, 3, 4]
    assert values_in(experts, "model.overrides.n_routed_experts") == [1, 2, 3, 4, 6]
    assert values_in(width, "model.overrides.moe_intermediate_size") == [16, 32, 64]
    assert values_in(hidden, "model.overrides.hidden_size") == [16, 32, 64, 128]


def test_a_latent_layer_shrinks_both_its_widths():
    sizes_of_kimi = "num_experts: 8, num_experts_per_token: 4, routed_expert_hidden_size: 256"
    kimi = load(
        f"model={{preset: kimi_k3, overrides: {{{sizes_of_kimi}, moe_intermediate_size: 128}}}}"
    )
    hidden = list(sizes(kimi))[3]
    keys = {"model.overrides.routed_expert_hidden_size", "model.overrides.hidden_size"}
    assert all(change.sets.keys() == keys for change in hidden)


def test_overrides_by_the_names_of_a_config_take_changes():
    qwen = load(
        "model={preset: qwen3_moe, overrides: {num_experts: 16, hidden_size: 256, "
        "moe_intermediate_size: 128}}"
    )
    change = list(sizes(qwen))[1][-1]
    values = change.applied_to(values_of(qwen))
    checked = check_document(Document(value=values), qwen.path)
    assert checked.loaded is not None
    assert checked.loaded.model.n_routed_experts == 12


def test_a_change_leaves_what_it_was_given():
    values = values_of(load())
    Change(what="", sets={"batch.tokens": [1, 1], "model.overrides.hidden_size": 128}).applied_to(
        values
    )
    assert values == values_of(load())


def test_changes_can_be_made_together():
    both = together((Change(what="one", sets={"a": 1}), Change(what="two", sets={"b": 2})))
    assert (both.what, both.sets) == ("one; two", {"a": 1, "b": 2})
