"""Coefficients of sums: fitted, the right ones explain, no look-alike does."""

import pytest
import torch

from reports.verdict.diagnosis.sums import TermSum

ROWS, COLUMNS = 3, 256


def bf16(values):
    return values.to(torch.bfloat16).to(torch.float64)


def terms_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, ROWS, COLUMNS, generator=generator, dtype=torch.float64)


def summed(terms, coefficients):
    weights = torch.tensor(coefficients, dtype=torch.float64)[:, None, None]
    return TermSum(
        names=[str(number) for number in range(len(terms))],
        terms=terms,
        due=torch.ones(terms.shape[:2], dtype=torch.float64),
        got=bf16((weights * terms).sum(0)),
    )


def test_coefficients_are_fitted():
    found = summed(terms_of(2), [2.25, 1.0]).fitted()
    assert torch.allclose(found, torch.tensor([[2.25], [1.0]], dtype=torch.float64), atol=0.01)


def test_a_term_without_a_value_keeps_its_due_coefficient():
    terms = terms_of(3)
    terms[1] = 0
    assert torch.equal(summed(terms, [1.0, 0.0, 2.0]).fitted()[1], torch.ones(ROWS).double())


def test_a_row_that_is_no_number_has_no_fit():
    found = summed(terms_of(2), [1.0, 1.0])
    found.got[1, 5] = torch.nan
    assert found.fitted()[:, 1].isnan().all()
    assert found.fitted()[:, 0].isfinite().all()


def test_the_right_coefficients_explain_every_row():
    found = summed(terms_of(2), [2.25, 1.0])
    assert found.explains(found.constant([2.25, 1.0])).all()


@pytest.mark.parametrize("routed", [2.2, 2.3, 1.0, 0.0])
def test_other_coefficients_explain_no_row(routed):
    found = summed(terms_of(2), [2.25, 1.0])
    assert not found.explains(found.constant([routed, 1.0])).any()


def test_what_is_due_is_explained_by_no_other_coefficients():
    found = summed(terms_of(2), [1.0, 1.0])
    for routed in (0.0, 0.5, 1.001, 1.5):
        assert not found.explains(found.constant([routed, 1.0])).any()


def test_one_more_store_on_the_way_is_allowed():
    terms = terms_of(2)
    found = summed(terms, [1.0, 0.0])
    late = TermSum(
        names=found.names,
        terms=terms,
        due=found.due,
        got=bf16(bf16(terms.sum(0)) - terms[1]),
    )
    assert late.explains(late.constant([1.0, 0.0])).all()


def test_noise_of_a_hundredth_is_explained_by_no_coefficient():
    terms = terms_of(2)
    noise = 0.01 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    noisy = TermSum(
        names=["a", "b"],
        terms=terms,
        due=torch.ones(2, ROWS, dtype=torch.float64),
        got=bf16(terms.sum(0) + noise),
    )
    for routed in (0.0, 1.5, 2.0, 1.01):
        assert not noisy.explains(noisy.constant([routed, 1.0])).any()
