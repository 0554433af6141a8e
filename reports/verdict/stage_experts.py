"""Own errors of the stages that work on grouped rows: permutes, GEMMs, activation."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import Stores, Terms, stores_of
from reports.verdict.captured import where_captured
from reports.verdict.compared import BAND
from reports.verdict.fused_quantiser import check_fused
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.route_values import RouteValues
from reports.verdict.rules import QUANTISER
from reports.verdict.stage_checks import StageChecks, product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject


def check_dispatch(subject: Subject, ledger: Ledger) -> None:
    """Slots hold the experts that were chosen; then what the format promises."""
    with where_captured(ledger, "dispatch/physical_ids", MOVES):
        _check_slots(subject, ledger)
    with where_captured(ledger, Stage.DISPATCH, MOVES, QUANTISER):
        subject.view.check_dispatch(subject, ledger)


def _check_slots(subject: Subject, ledger: Ledger) -> None:
    experts = torch.tensor([*subject.layer.slot_experts, -1])
    physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.int64)
    is_slot = (physical >= 0) & (physical < len(experts) - 1)
    held = torch.where(is_slot, experts[torch.where(is_slot, physical, -1)], physical)
    chosen = subject.layer_tensor(Stage.ROUTE, "topk_ids").to(torch.int64)
    rows = subject.layer_rows
    ledger.moved(Stage.DISPATCH, "physical_ids", rows, got=held, want=chosen)


def check_pre_permute(subject: Subject, ledger: Ledger) -> None:
    """Every route's grouped row meets the route's expert; then what the format promises."""
    with where_captured(ledger, Stage.PRE_PERMUTE, MOVES, QUANTISER):
        subject.view.check_pre_permute(subject, ledger)
    with where_captured(ledger, "experts of grouped rows", MOVES):
        _check_experts_met(subject, ledger)


def _check_experts_met(subject: Subject, ledger: Ledger) -> None:
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
    with where_captured(ledger, Stage.GEMM1, BAND):
        for part in subject.route_parts:
            checks = StageChecks(ledger, Stage.GEMM1, subject.layer, part.rows)
            lhs = part.values(Stage.PRE_PERMUTE, "rows.hidden_states")
            _check_grouped_gemm(
                part, checks, "gate_up", lhs, lambda rank, local: weights.expert(rank, local)[0]
            )


def check_activation(subject: Subject, ledger: Ledger) -> None:
    """Activation of the traced gate and up, then its quantiser."""
    layer = subject.layer
    stores = stores_of(layer.activation, layer.gemm_layout, layer.scale_format)
    if "activation" not in subject.stage(Stage.ACTIVATION, 0):
        _check_fused_activation(subject, stores, ledger)
        return
    with where_captured(ledger, "activation/activation", BAND):
        for part in subject.route_parts:
            checks = StageChecks(ledger, Stage.ACTIVATION, layer, part.rows)
            activation = part.tensor(Stage.ACTIVATION, "activation")
            checks.activation("activation", activation, part.tensor(Stage.GEMM1, "gate_up"), stores)
    with where_captured(ledger, "activation/hidden_states", QUANTISER, MOVES):
        for part in subject.route_parts:
            checks = StageChecks(ledger, Stage.ACTIVATION, layer, part.rows)
            activation = part.tensor(Stage.ACTIVATION, "activation")
            codes = part.tensor(Stage.ACTIVATION, "hidden_states")
            scale = part.scale(Stage.ACTIVATION, "hidden_states_scale")
            checks.quantised("hidden_states", codes, scale, activation)


def _check_fused_activation(subject: Subject, stores: Stores, ledger: Ledger) -> None:
    """A kernel that quantises what it computed, and leaves codes alone to be captured."""
    with where_captured(ledger, Stage.ACTIVATION, BAND, QUANTISER):
        for part in subject.route_parts:
            checks = StageChecks(ledger, Stage.ACTIVATION, subject.layer, part.rows)
            gate_up = part.tensor(Stage.GEMM1, "gate_up")
            values = part.tensor(Stage.ACTIVATION, "hidden_states")
            scale = part.scale(Stage.ACTIVATION, "hidden_states_scale")
            want, band = checks.activation_due(gate_up, stores)
            check_fused(checks, "hidden_states", values, scale, want, band)


def check_gemm2(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """GEMM2 of the traced quantised activation with the traced weights."""
    with where_captured(ledger, Stage.GEMM2, BAND):
        for part in subject.route_parts:
            checks = StageChecks(ledger, Stage.GEMM2, subject.layer, part.rows)
            lhs = part.values(Stage.ACTIVATION, "hidden_states")
            _check_grouped_gemm(
                part, checks, "output", lhs, lambda rank, local: weights.expert(rank, local)[1]
            )


def _check_grouped_gemm(
    routes: RouteValues,
    checks: StageChecks,
    tensor: str,
    lhs: Tensor,
    weight_of: Callable[[int, int], Tensor],
) -> None:
    """One golden GEMM for each expert slot that has rows: ``lhs`` [N, K] float64.

    A row that ``m_indices`` gives to no expert stays unwritten, and so NaN.
    """
    got = routes.tensor(checks.stage, tensor)
    value = torch.full(got.shape, torch.nan, dtype=torch.float64)
    magnitude = torch.zeros(got.shape, dtype=torch.float64)
    for rank, local, positions in routes.slots():
        terms = product(lhs[positions], weight_of(rank, local))
        value[positions], magnitude[positions] = terms.value, terms.magnitude
    checks.gemm(tensor, got, Terms(value=value, magnitude=magnitude), lhs.shape[1])
