"""Own errors of the stages that work on received rows: dispatch, permutes, GEMMs, activation."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import Terms, weighted_sum
from moe.trace import StageTensors
from reports.verdict.band import fp32_noise, stored_bf16
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import BAND, StageChecks, product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Rows, Subject, take_rows


def check_dispatch(subject: Subject, ledger: Ledger) -> None:
    """What went on the wire by the quantiser rule; what arrived is what was sent."""
    sent = {"hidden_states": subject.token_tensor(Stage.DISPATCH, "wire")}
    if "wire_scale" in subject.stage(Stage.DISPATCH, 0):
        sent["hidden_states_scale"] = subject.token_tensor(Stage.DISPATCH, "wire_scale")
    checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, subject.token_rows)
    x = subject.token_tensor(Stage.GLUE_IN, "hidden_states")
    checks.quantised("wire", sent["hidden_states"], sent.get("hidden_states_scale"), x)
    topk_ids = torch.cat([subject.routed_ids(rank) for rank in subject.ranks])
    topk_weights = subject.token_tensor(Stage.ROUTE, "topk_weights")
    for rank in subject.ranks:
        traced, tokens = subject.stage(Stage.DISPATCH, rank), subject.received_tokens[rank]
        rows = Rows.of_rank(rank, len(tokens), tokens)
        arrived = StageChecks(ledger, Stage.DISPATCH, subject.layer, rows)
        _moved(arrived, "hidden_states", traced, sent, tokens)
        ids = _local_ids(subject, rank, topk_ids[tokens])
        weights = topk_weights[tokens].masked_fill(ids < 0, 0)
        ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
        ledger.moved(Stage.DISPATCH, "topk_weights", rows, got=traced["topk_weights"], want=weights)


def _local_ids(subject: Subject, rank: int, topk_ids: Tensor) -> Tensor:
    """[R, K] int64 ids as the rank counts its own experts, -1 for those of other ranks."""
    experts = subject.layer.local_experts[rank]
    local = torch.full((subject.layer.num_experts + 1,), -1)
    local[list(experts)] = torch.arange(len(experts))
    return local[topk_ids]


def check_pre_permute(subject: Subject, ledger: Ledger) -> None:
    """Every route's grouped row is the received row, under the route's expert."""
    for rank in subject.ranks:
        sent, traced = subject.stage(Stage.DISPATCH, rank), subject.stage(Stage.PRE_PERMUTE, rank)
        placed = subject.placed[rank]
        grouped = {
            name.removeprefix("rows."): take_rows(tensor, placed.row)
            for name, tensor in traced.items()
            if name in ("rows.hidden_states", "rows.hidden_states_scale", "rows.m_indices")
        }
        checks = StageChecks(ledger, Stage.PRE_PERMUTE, subject.layer, placed.rows)
        _moved(checks, "hidden_states", grouped, sent, placed.received)
        ledger.moved(
            Stage.PRE_PERMUTE,
            "rows.m_indices",
            placed.rows,
            got=grouped["m_indices"][:, None],
            want=placed.local[:, None].to(torch.int32),
        )
        received = Rows.of_rank(rank, sent["topk_ids"].shape[0], subject.received_tokens[rank])
        for name in ("topk_ids", "topk_weights"):
            got, want = traced[f"restore.{name}"], sent[name]
            ledger.moved(Stage.PRE_PERMUTE, f"restore.{name}", received, got=got, want=want)


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
    checks.activation("activation", activation, subject.route_tensor(Stage.GEMM1, "gate_up"))
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


def check_post_permute(subject: Subject, ledger: Ledger) -> None:
    """Weighted sum of a received row's routes, slots ascending, one rounding."""
    for rank in subject.ranks:
        got = subject.stage(Stage.POST_PERMUTE, rank)["partial"].to(torch.float64)
        restore = subject.stage(Stage.PRE_PERMUTE, rank)
        expert_rows, index = (
            subject.stage(Stage.GEMM2, rank)["output"],
            restore["restore.output_index"],
        )
        is_route = (restore["restore.topk_ids"] >= 0) & (index >= 0) & (index < len(expert_rows))
        at, top_k = is_route.nonzero(as_tuple=True), index.shape[1]
        outputs = torch.zeros(got.shape[0], top_k, got.shape[1], dtype=torch.float64)
        weights = torch.zeros(got.shape[0], top_k, dtype=torch.float64)
        outputs[at] = expert_rows[index[at]].to(torch.float64)
        weights[at] = restore["restore.topk_weights"][at].to(torch.float64)
        want = weighted_sum(outputs, weights)
        rows = Rows.of_rank(rank, got.shape[0], subject.received_tokens[rank])
        band = stored_bf16(want.value, fp32_noise(want.magnitude, top_k))
        ledger.cells(BAND, Stage.POST_PERMUTE, "partial", rows, got=got, want=want.value, band=band)


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


def _moved(
    checks: StageChecks, name: str, traced: StageTensors, source: StageTensors, index: Tensor
) -> None:
    """Codes and scales of ``traced`` are those of ``source`` at ``index``."""
    for tensor in (name, f"{name}_scale"):
        if tensor in traced:
            want = take_rows(source[tensor], index)
            checks.ledger.moved(checks.stage, tensor, checks.rows, got=traced[tensor], want=want)
