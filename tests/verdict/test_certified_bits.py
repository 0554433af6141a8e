"""Two topologies on exact inputs: certified cells are compared, whatever else may differ."""

from dataclasses import replace
from functools import cache

import pytest

from actors.by_mode import Keep
from actors.driver import run_scenario
from actors.sides import sides_of
from moe.formats import Stage
from reports.comparison import Likeness
from reports.record import Mode, Verdict
from reports.verdict.canonical import OUTPUT, CanonicalForward, NamedRows
from reports.verdict.side_by_side import Side, side_by_side
from scenarios.loader import load_scenario
from tests.verdict.clean_runs import FOUR_RANKS, SMOKE

ONE_RANK = ("parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}", "batch.tokens=[17]")
EXACT = (
    "run.runtime=loopback",
    "inputs.modes=[exact]",
    "platform=sm90",
    "model.overrides.moe_intermediate_size=256",
)
"""Scales with a mantissa and two blocks of columns: sums across them leave cells uncertified."""
RANKS = {"one": ONE_RANK, "four": FOUR_RANKS}
COMPARED = (
    (Stage.GLUE_IN, "hidden_states"),
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.GEMM2, "output"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
    OUTPUT,
)
"""What both certify of an all-to-all layer."""


@cache
def side(name: str) -> Side:
    loaded = load_scenario(SMOKE, overrides=(*EXACT, *RANKS[name]))
    return sides_of(name, run_scenario(loaded, asks=False, keep=Keep(sides=True)))[Mode.EXACT]


def changed(one: Side, key: tuple[Stage, str], row: int, column: int) -> Side:
    """One cell of a side twice as large, or 1 where it was 0."""
    rows = one.forward.values[key]
    values = rows.values.clone()
    values[row, column] = 1.0 if values[row, column] == 0 else 2 * values[row, column]
    other = NamedRows(names=rows.names, traced=values, ranks=rows.ranks)
    changed = {**one.forward.values, key: other}
    return replace(one, forward=CanonicalForward(layer=one.forward.layer, values=changed))


def cell(key: tuple[Stage, str], *, certified: bool) -> tuple[int, int]:
    """The first cell in the second half that both certify alike, or that they do not."""
    alike = side("one").certain[key] == side("four").certain[key]
    half = len(alike) // 2
    row, column = (alike[half:] == certified).nonzero()[0].tolist()
    return row + half, column


def test_certified_cells_are_the_same_on_one_rank_and_on_four():
    edge = side_by_side(side("one"), side("four"))
    assert (edge.likeness, edge.stage, edge.cells) == (Likeness.SAME_BITS, None, 0)
    assert edge.num_cells >= 0.95 * 17 * side("one").forward.output.shape[1]


@pytest.mark.parametrize("key", COMPARED, ids=str)
def test_a_changed_certified_cell_breaks_at_its_stage_token_and_rank(key):
    row, column = cell(key, certified=True)
    edge = side_by_side(side("one"), changed(side("four"), key, row, column))
    token = row if len(side("four").certain[key]) == 17 else row // side("one").forward.layer.top_k
    assert edge.likeness is Likeness.BREAKS
    assert (edge.stage, edge.token, edge.column) == (key[0], token, column)
    assert edge.rank == int(side("four").forward.values[key].ranks[row])
    assert f"on rank {edge.rank} of four, first for token {token}" in edge.reason


def test_a_cell_that_is_not_certified_is_not_compared():
    row, column = cell(OUTPUT, certified=False)
    edge = side_by_side(side("one"), changed(side("four"), OUTPUT, row, column))
    assert edge.likeness is Likeness.SAME_BITS


def test_a_rounding_point_that_one_declares_excuses_no_certified_cell():
    """Behind combine the two may differ on drawn inputs; here that is what breaks."""
    row, column = cell(OUTPUT, certified=True)
    edge = side_by_side(side("one"), changed(side("four"), OUTPUT, row, column))
    assert edge.declared is Stage.POST_PERMUTE
    assert edge.likeness is Likeness.BREAKS


def test_cells_that_topologies_certify_to_hold_different_values_are_not_compared():
    one = side("one")
    row, column = cell(OUTPUT, certified=True)
    other_value = one.certain[OUTPUT].clone()
    other_value[row, column] += 1
    told = replace(one, certain={**one.certain, OUTPUT: other_value})
    edge = side_by_side(told, changed(side("four"), OUTPUT, row, column))
    assert edge.likeness is Likeness.SAME_BITS


def test_a_side_that_is_wrong_breaks_and_the_cell_is_named_as_well():
    row, column = cell(OUTPUT, certified=True)
    wrong = changed(side("four"), OUTPUT, row, column)
    wrong = replace(wrong, verdict=Verdict.DISCREPANCY, summary="it is wrong")
    edge = side_by_side(side("one"), wrong)
    assert edge.likeness is Likeness.BREAKS
    assert edge.reason.startswith("certified cells of hidden_states differ in glue_out on rank ")
    assert edge.reason.endswith("; four: it is wrong")


def test_without_traces_of_both_sides_all_bits_are_compared():
    row, column = cell(OUTPUT, certified=False)
    read = replace(side("one"), certain=None)
    edge = side_by_side(read, changed(side("four"), OUTPUT, row, column))
    assert edge.stage is not None


def test_a_mode_without_a_certificate_has_no_certain_values():
    loaded = load_scenario(SMOKE, overrides=["run.runtime=loopback", "batch.tokens=[2, 1]"])
    sides = sides_of("random", run_scenario(loaded, asks=False, keep=Keep(sides=True)))
    assert sides[Mode.RANDOM].certain is None
