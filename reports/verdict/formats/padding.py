"""What rows hold that belong to no route."""

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.deviation import Breach
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import broken
from reports.verdict.subject import Subject

ROWS = "rows.hidden_states"


def check_padding(subject: Subject, rank: int, ledger: Ledger, *, zeroes: bool) -> None:
    """Contract: what padding of segments holds.

    Packed scales are zero: GEMMs read those of whole tiles, and the buffer is zeroed in front of
    the scatter. In deterministic inference other scales and rows are zero as well.

    Args:
        subject: the forward.
        rank: whose rows.
        ledger: takes the findings.
        zeroes: whether inference is deterministic.

    Source: SGLang 0.5.21, the pre-permutes that call ep_moe/kernels.py::ep_scatter.
    """
    traced = subject.stage(Stage.PRE_PERMUTE, rank)
    routes = subject.view.live_rows_due(subject, rank)
    for name in (ROWS, f"{ROWS}_scale"):
        if name not in traced or not (zeroes or traced[name].dtype == torch.int32):
            continue
        is_padding = torch.ones(len(traced[name]), dtype=torch.bool)
        is_padding[routes[(routes >= 0) & (routes < len(is_padding))]] = False
        wrong = (is_padding & _has_a_bit(traced[name])).nonzero()[:, 0]
        if wrong.numel():
            detail = f"padding row {int(wrong[0])} is not zero; {len(wrong)} such rows"
            broken(ledger, Stage.PRE_PERMUTE, rank, name, detail, breach=Breach.ZERO_PADDING)


def _has_a_bit(rows: Tensor) -> Tensor:
    """[M] bool: rows of any dtype and layout with a bit set."""
    as_bytes = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return as_bytes.any(dim=1)
