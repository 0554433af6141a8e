"""Faults of tiles and launches: which rows stay unwritten, in segments and in slabs."""

import pytest
import torch

from moe.faults.tiles import (
    gemm_tail_rows_dropped,
    masked_rows_past_launch,
    odd_block_unwritten,
    padding_scales_unwritten,
    tile_of_next_block,
    tile_spilled,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import ActivationOutput, Gemm1Output, Gemm2Output, TopKOutput
from tests.unit.faults.values import context, expanded, in_slabs, permuted, received


def there(rows, sent=None, top_k=1):
    """What earlier stages handed on."""
    ids = torch.zeros(1, top_k, dtype=torch.int32)
    return {
        Stage.ROUTE: TopKOutput(logits=torch.zeros(1, 1), topk_ids=ids, topk_weights=ids * 1.0),
        Stage.DISPATCH: sent or received(),
        Stage.PRE_PERMUTE: rows,
    }


def unwritten(output):
    return output.flatten(0, -2).isnan().any(-1).nonzero()[:, 0].tolist()


def test_packed_scales_of_padding_are_garbage_and_those_of_routes_stay():
    rows = permuted(scale=mn_major(torch.tensor([[7], [0], [9], [0]], dtype=torch.int32)))
    wrong = padding_scales_unwritten(rows, context(there(rows))).rows.hidden_states_scale
    garbage = 2**31 - 1
    assert wrong.flatten().tolist() == [7, garbage, 9, garbage]
    assert wrong.stride() == (1, 4)


@pytest.mark.parametrize(
    ("rows", "sent"),
    [
        (permuted(), received()),
        (permuted(scale=torch.ones(4, 1)), received()),
        (permuted(scale=torch.ones(4, 1, dtype=torch.int32)), expanded()),
        (in_slabs(), received()),
    ],
    ids=["no scales", "fp32", "expanded", "slabs"],
)
def test_other_scales_of_padding_promise_nothing(rows, sent):
    assert padding_scales_unwritten(rows, context(there(rows, sent))) is rows


def activated(dtype=torch.float32):
    rows = torch.zeros(2, 3, 1, dtype=dtype)
    return ActivationOutput(activation=rows, hidden_states=rows, hidden_states_scale=rows)


@pytest.mark.parametrize(
    ("masked_m", "top_k", "past"),
    [((2, 3), 1, [4, 5]), ((3, 3), 1, [3, 4, 5]), ((1, 2), 1, []), ((3, 3), 2, [])],
    ids=str,
)
def test_real_rows_past_the_launch_are_unwritten_slab_after_slab(masked_m, top_k, past):
    """Slabs of three rows: a launch of three blocks for each slot of a token."""
    rows = in_slabs(masked_m, height=3)
    wrong = masked_rows_past_launch(activated(), context(there(rows, top_k=top_k)))
    for tensor in (wrong.activation, wrong.hidden_states, wrong.hidden_states_scale):
        assert unwritten(tensor) == past


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(in_slabs((3, 3), height=3), torch.bfloat16), (permuted(), torch.float32)],
    ids=["no limit", "segments"],
)
def test_other_kernels_launch_for_every_row(rows, dtype):
    middle = activated(dtype)
    assert masked_rows_past_launch(middle, context(there(rows))) is middle


@pytest.mark.parametrize(("output", "name"), [(Gemm1Output, "gate_up"), (Gemm2Output, "output")])
@pytest.mark.parametrize(
    ("tile", "dropped"), [(2, [2, 5]), (1, []), (3, [5]), (4, [0, 1, 2, 5])], ids=str
)
def test_rows_past_an_experts_last_whole_tile_are_unwritten(output, name, tile, dropped):
    """Three live rows of the first expert, one of the second."""
    rows = permuted((0, 0, 0, 0, 0, 1), (0, 1, 2, 5))
    product = output(**{name: torch.zeros(6, 1)})
    wrong = gemm_tail_rows_dropped(product, context(there(rows), tile=tile))
    assert unwritten(getattr(wrong, name)) == dropped


def test_rows_past_a_slabs_last_whole_tile_are_unwritten():
    rows = in_slabs((3, 2), height=4)
    output = Gemm1Output(gate_up=torch.zeros(2, 4, 1))
    wrong = gemm_tail_rows_dropped(output, context(there(rows), tile=2)).gate_up
    assert unwritten(wrong) == [2]


@pytest.mark.parametrize(("tile", "spilled"), [(2, []), (3, [2, 4]), (4, [2, 3, 4])], ids=str)
def test_a_tile_larger_than_its_segment_covers_the_rows_behind(tile, spilled):
    """Segments of one, two and one live rows that begin at rows 0, 2 and 4."""
    rows = permuted((0, 0, 1, 1, 2, 2), (0, 2, 3, 4))
    output = Gemm1Output(gate_up=torch.zeros(6, 1))
    wrong = tile_spilled(output, context(there(rows), tile=tile)).gate_up
    assert unwritten(wrong) == spilled


def test_tiles_do_not_leave_their_slab():
    output = Gemm1Output(gate_up=torch.zeros(2, 2, 1))
    assert tile_spilled(output, context(there(in_slabs()), tile=64)) is output


@pytest.mark.parametrize("fault", [gemm_tail_rows_dropped, tile_spilled])
def test_a_stage_that_multiplies_nothing_has_no_tiles(fault):
    middle = activated()
    assert fault(middle, context(there(permuted()), tile=1)) is middle


def blocks(*values):
    """Four grouped rows whose blocks of 128 columns hold one value each."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(128).repeat(4, 1)


def first_of_blocks(rows):
    return rows[:, ::128].tolist()


@pytest.mark.parametrize(("tile", "moved"), [(1, [0]), (64, [0, 2])], ids=["a row", "all rows"])
def test_live_rows_of_a_tile_hold_the_block_behind(tile, moved):
    rows = permuted()
    output = Gemm1Output(gate_up=blocks(1, 2, 3))
    wrong = tile_of_next_block(output, context(there(rows), tile=tile)).gate_up
    assert first_of_blocks(wrong) == [[2, 2, 3] if i in moved else [1, 2, 3] for i in range(4)]


def test_a_single_block_has_none_behind():
    output = Gemm2Output(output=blocks(1))
    wrong = tile_of_next_block(output, context(there(permuted()), tile=64)).output
    assert torch.equal(wrong, output.output)


@pytest.mark.parametrize(
    ("values", "lost"), [((1, 2, 3), [256]), ((1,), [0]), ((1, 2), [])], ids=["3", "1", "2"]
)
def test_the_last_of_an_odd_number_of_blocks_is_unwritten_in_live_rows(values, lost):
    output = Gemm2Output(output=blocks(*values))
    wrong = odd_block_unwritten(output, context(there(permuted()))).output
    columns = wrong.isnan().any(0).nonzero()[:, 0]
    assert columns[::128].tolist() == lost
    assert unwritten(wrong) == ([0, 2] if lost else [])
