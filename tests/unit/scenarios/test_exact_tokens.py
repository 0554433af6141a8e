"""Exact tokens: few bits, numbers that can be read back, draws that know no neighbours."""

import pytest
import torch

from scenarios.errors import InputError
from scenarios.exact_tokens import exact_hidden_states, exact_topk_weights, tokens_of_rows

HIDDEN = 320


def test_every_row_names_its_token():
    rows = exact_hidden_states(7, 300, HIDDEN)
    assert torch.equal(tokens_of_rows(rows), torch.arange(300))


def test_a_number_survives_scaling_and_a_shuffle():
    rows, order = exact_hidden_states(7, 300, HIDDEN), torch.arange(300).roll(41)
    assert torch.equal(tokens_of_rows(rows[order].double() * 0.3), order)


def test_rows_of_neighbours_differ_in_many_signs():
    """Else most tokens would agree in what a row of weights reads."""
    signs = exact_hidden_states(7, 64, HIDDEN)[:, 1:25] < 0
    assert int((signs[1:] != signs[:-1]).sum(1).min()) >= 4


def test_a_token_does_not_depend_on_how_many_there_are():
    assert torch.equal(exact_hidden_states(7, 40, HIDDEN)[:9], exact_hidden_states(7, 9, HIDDEN))


def test_another_seed_gives_other_tokens():
    assert not torch.equal(exact_hidden_states(7, 9, HIDDEN), exact_hidden_states(8, 9, HIDDEN))


def test_blocks_hold_signs_times_one_power_of_two_and_an_anchor_of_eight():
    rows = exact_hidden_states(7, 50, 256).double().view(50, 2, 128)
    power = rows[..., 0] / 8
    assert set(power[:, 0].tolist()) == {1.0}
    assert set(power[:, 1].tolist()) == {2.0, 4.0}
    assert set((rows[..., 1:] / power[..., None]).unique().tolist()) == {-1.0, 0.0, 1.0}


def test_more_tokens_than_signs_tell_apart_are_refused():
    with pytest.raises(InputError, match="16 tokens apart, and there are 17"):
        exact_hidden_states(7, 17, 5)


@pytest.mark.parametrize(
    ("top_k", "sizes"),
    [
        (1, [1.0]),
        (2, [0.25, 0.5]),
        (4, [0.125, 0.125, 0.25, 0.25]),
        (6, [0.125] * 4 + [0.25] * 2),
        (8, [0.0625] * 4 + [0.125] * 4),
        (10, [0.0625] * 4 + [0.125] * 6),
    ],
)
def test_weights_are_these_powers_of_two_in_some_order(top_k, sizes):
    weights = exact_topk_weights(7, 20, top_k)
    assert (weights.sort(dim=1).values == torch.tensor(sizes)).all()
    assert top_k < 3 or len(weights.unique(dim=0)) > 1
