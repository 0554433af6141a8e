"""Own errors of the stages that work on grouped rows: permutes, GEMMs, activation."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import Terms, stores_of
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import StageChecks, product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject


def check_dispatch(subject: Subject, ledger: Ledger) -> None:
    """Slots hold the experts that were chosen; then what the format promises."""
    experts = torch.tensor([*subject.layer.slot_experts, -1])
    physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.int64)
    held = experts[torch.where((physical >= 0) & (physical < len(experts) - 1), physical, -1)]
    chosen = subject.layer_tensor(Stage.ROUTE, "topk_ids").to(torch.int64)
    rows = subject.layer_rows
    ledger.moved(Stage.DISPATCH, "physical_ids", rows, got=held, want=chosen)
    subject.view.check_dispatch(subject, ledger)


def check_pre_permute(subject: Subject, ledger: Ledger) -> None:
    """Every route's grouped row meets the route's expert; then what the format promises."""
    subject.view.check_pre_permute(subject, ledger)
    for rank in subject.ranks:
        placed = subject.placed[rank]
        ledger.moved(
            Stage.PRE_PERMUTE,
            "rows",
            placed.rows,
            got=subject.slot_of_row[rank][placed.row][:, None],
            want=placed.local[:, None],
        )


def check_gemm1(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """GEMM1 of the traced grouped rows with the traced weights."""
    checks = StageChecks(ledger, Stage.GEMM1, subject.layer, subject.route_rows)
    lhs = subject.route_values(Stage.PRE_PERMUTE, "rows.hidden_states")
    _check_grouped_gemm(
        subject, checks, "gate_up", lhs, lambda rank, local: weights.expert(rank, local)[0]
    )


def check_activation(subject: Subject, ledger: Ledger) -> None:
    """Activation of the traced gate and up, then its quantiser."""
    checks = StageChecks(ledger, Stage.ACTIVATION, subject.layer, subject.route_rows)
    activation = subject.route_tensor(Stage.ACTIVATION, "activation")
    gate_up = subject.route_tensor(Stage.GEMM1, "gate_up")
    layer = subject.layer
    stores = stores_of(layer.activation, layer.gemm_layout, layer.scale_format)
    checks.activation("activation", activation, gate_up, stores)
    codes = subject.route_tensor(Stage.ACTIVATION, "hidden_states")
    scale = subject.route_scale(Stage.ACTIVATION, "hidden_states_scale")
    checks.quantised("hidden_states", codes, scale, activation)


def check_gemm2(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """GEMM2 of the traced quantised activation with the traced weights."""
    checks = StageChecks(ledger, Stage.GEMM2, subject.layer, subject.route_rows)
    lhs = subject.route_values(Stage.ACTIVATION, "hidden_states")
    _check_grouped_gemm(
        subject, checks, "output", lhs, lambda rank, local: weights.expert(rank, local)[1]
    )


def _check_grouped_gemm(
    subject: Subject,
    checks: StageChecks,
    tensor: str,
    lhs: Tensor,
    weight_of: Callable[[int, int], Tensor],
) -> None:
    """One golden GEMM for each expert slot that has rows: ``lhs`` [N, K] float64.

    A row that ``m_indices`` gives to no expert stays unwritten, and so NaN.
    """
    got = subject.route_tensor(checks.stage, tensor)
    value = torch.full(got.shape, torch.nan, dtype=torch.float64)
    magnitude = torch.zeros(got.shape, dtype=torch.float64)
    for rank, local, positions in subject.slots_with_rows():
        terms = product(lhs[positions], weight_of(rank, local))
        value[positions], magnitude[positions] = terms.value, terms.magnitude
    checks.gemm(tensor, got, Terms(value=value, magnitude=magnitude), lhs.shape[1])
