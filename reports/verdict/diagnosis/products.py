"""GEMM rows by the wrong weights: another expert's, or with gate and up exchanged."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.band import gemm_noise, stored_bf16
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.stage_checks import product

INPUTS = {
    Stage.GEMM1: (Stage.PRE_PERMUTE, "rows.hidden_states", 0),
    Stage.GEMM2: (Stage.ACTIVATION, "hidden_states", 1),
}
"""What a grouped GEMM multiplies, and which of an expert's two matrices it reads."""


def other_experts(case: Case) -> Iterator[Explanation]:
    """The expert of the rank whose weights explain a row.

    Only rows whose first column is that of an expert are recomputed with all its weights.
    """
    if case.stage not in INPUTS:
        return
    stage, name, matrix = INPUTS[case.stage]
    rows = case.subject.route_rows
    lhs = case.subject.route_values(stage, name)[rows.rank == case.rank][case.within]
    local = case.layer.local_experts(case.rank)
    found = torch.full((len(case.here),), -1)
    for slot, expert in enumerate(local):
        first = case.scene.weights.first_row_held(case.rank, slot, matrix)[None]
        open_rows = (found < 0) & (case.rows.expert != expert)
        may_fit = (_fits(case, lhs, first, case.got[:, :1]) & open_rows).nonzero()[:, 0]
        if len(may_fit):
            weight = case.scene.weights.expert(case.rank, slot)[matrix]
            fits = _fits(case, lhs[may_fit], weight, case.got[may_fit])
            found[may_fit[fits]] = expert
    named = (found >= 0).nonzero()[:, 0].tolist()
    said = [f"{name_of(case.rows, at)} expert {int(found[at])}'s" for at in named]
    yield Explanation(
        mistake=Mistake.WRONG_EXPERT,
        words=f"rows multiplied with another expert's weights: {listed(said)}",
        explains=found >= 0,
        cost=bits_of_choice(len(local) - 1, len(named)),
    )


def _fits(case: Case, lhs: Tensor, weight: Tensor, got: Tensor) -> Tensor:
    """[R] bool: rows [R, N] that are the product of [R, K] and [N, K]."""
    if lhs.shape[1] != weight.shape[1]:
        return torch.zeros(len(got), dtype=torch.bool)
    terms = product(lhs, weight)
    noise = gemm_noise(terms.magnitude, lhs.shape[1], case.layer.arithmetic)
    return ((got - terms.value).abs() <= stored_bf16(terms.value, noise)).all(1)


def halves_exchanged(case: Case) -> Iterator[Explanation]:
    """Gate columns where up's are due, and the reverse."""
    if case.tensor.rpartition(".")[2] != "gate_up":
        return
    width = case.got.shape[1]
    order = torch.arange(width)
    orders = (
        ("exchanged", order.roll(width // 2)),
        ("taking turns", order.view(2, -1).T.flatten()),
    )
    for words, columns in orders:
        error = (case.got - case.want[:, columns]).abs()
        yield Explanation(
            mistake=Mistake.GATE_UP_SWAPPED,
            words=f"gate and up columns {words}",
            explains=(error <= case.band[:, columns]).all(1),
            cost=bits_of_choice(len(orders)),
        )
