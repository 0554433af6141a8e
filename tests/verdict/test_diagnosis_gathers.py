"""Gathers: one chunk for all, chunks of one length, a sum left out; and mere disorder."""

import torch

from moe.formats import Stage
from tests.verdict.diagnoses import diagnosed, named


def chunks_of(run, rank):
    """What each rank of the attention group gives back, and whose turn it is."""
    group = run.resolved.judged.layout.attention_tp_group(rank)
    return [run.tensor(Stage.TAIL, member, "output") for member in group]


def of_glue_out(run, rank, rows):
    return diagnosed(run, Stage.GLUE_OUT, rank, {"hidden_states": rows})


def test_the_first_chunk_in_every_place_is_named(clean_layout):
    run = clean_layout("tp_ep_all_to_all")
    chunks = chunks_of(run, 1)
    rows = torch.cat([chunks[0][torch.arange(len(chunk)) % len(chunks[0])] for chunk in chunks])
    found = of_glue_out(run, 1, rows)
    assert named(found) == ("collective", "high")
    assert f"the first of {len(chunks)} chunks" in found.words


def test_chunks_in_another_order_are_misplaced_rows(clean_layout):
    run = clean_layout("tp_ep_all_to_all")
    rows = torch.cat(chunks_of(run, 1)).flip(0)
    found = of_glue_out(run, 1, rows)
    assert named(found) == ("rows_misplaced", "high")


def test_rows_of_noise_come_from_no_chunk(clean_layout):
    run = clean_layout("tp_ep_all_to_all")
    rows = torch.cat(chunks_of(run, 1))
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    assert named(of_glue_out(run, 1, noise.to(rows.dtype))) == (None, "none")


def test_a_sum_with_zeros_that_was_left_out_leaves_the_ranks_own_rows(clean_layout):
    run = clean_layout("dp_tp_all_reduce")
    rank = 0
    own = run.tensor(Stage.GLUE_IN, rank, "own")
    rows = torch.zeros_like(run.tensor(Stage.GLUE_IN, rank, "hidden_states"))
    rows[: len(own)] = own
    found = diagnosed(run, Stage.GLUE_IN, rank, {"hidden_states": rows})
    assert named(found) == ("sum_missing", "high")
    assert f"all but {len(own)} of its own are zero" in found.words


def test_a_partial_that_was_not_summed_is_the_ranks_own(clean_layout):
    run = clean_layout("pure_tp")
    own = run.tensor(Stage.TAIL, 1, "summand")
    found = diagnosed(run, Stage.TAIL, 1, {"reduced": own})
    assert named(found) == ("sum_missing", "high")
    assert "rank 1 goes on with its own partial" in found.words


def test_a_finished_sum_that_was_summed_again_is_repeated(clean_layout):
    run = clean_layout("pure_tp")
    count = len(run.traces)
    twice = (run.tensor(Stage.TAIL, 1, "reduced").float() * count).to(torch.bfloat16)
    found = diagnosed(run, Stage.TAIL, 1, {"reduced": twice})
    assert named(found) == ("sum_repeated", "high")
    assert f"coefficient {count}" in found.words
