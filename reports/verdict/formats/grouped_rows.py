"""What pre-permute does to a received row: it copies it, or quantises it on this rank."""

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.decode import dequantized
from reports.verdict.ledger import Ledger
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import StageChecks, check_moved
from reports.verdict.subject import Subject

ROWS = "rows.hidden_states"


def check_copied(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Every route's grouped row is the received row, codes and scales."""
    placed, traced = subject.placed[rank], subject.stage(Stage.PRE_PERMUTE, rank)
    names = ["hidden_states", *(["hidden_states_scale"] if f"{ROWS}_scale" in traced else [])]
    grouped = {
        name: take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, f"rows.{name}"), placed.row)
        for name in names
    }
    sent = {name: subject.grouped(Stage.DISPATCH, rank, name) for name in names}
    checks = StageChecks(ledger, Stage.PRE_PERMUTE, subject.layer, placed.rows)
    check_moved(checks, "hidden_states", grouped, sent, placed.received)


def check_quantised(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Every route's grouped row is the received row by the recipe's quantiser, if it has one.

    The quantiser is the usual one, with the usual floor; what was received is bf16, or codes that
    are quantised again.
    """
    placed, traced = subject.placed[rank], subject.stage(Stage.PRE_PERMUTE, rank)
    values = take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, ROWS), placed.row)
    scale = None
    if f"{ROWS}_scale" in traced:
        scale = take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, f"{ROWS}_scale"), placed.row)
    checks = StageChecks(ledger, Stage.PRE_PERMUTE, subject.layer, placed.rows)
    checks.quantised(ROWS, values, scale, _received(subject, rank))


def _received(subject: Subject, rank: int) -> Tensor:
    """[N, H] a rank's placed routes as they arrived: bf16, or what codes stand for in fp32."""
    received, at = "hidden_states", subject.placed[rank].received
    values = take_rows(subject.grouped(Stage.DISPATCH, rank, received), at)
    if f"{received}_scale" not in subject.stage(Stage.DISPATCH, rank):
        return values
    scale = take_rows(subject.grouped(Stage.DISPATCH, rank, f"{received}_scale"), at)
    group_size = subject.layer.scales_of(Stage.DISPATCH, received).group_size
    return dequantized(values, scale, group_size).to(torch.float32)
