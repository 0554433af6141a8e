"""Whether the same tokens give the same bits again, and the first stage where they do not."""

from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.ledger import Ledger, bitwise_equal
from reports.verdict.rows import Rows, take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING

RERUN: Final = "determinism: run to run"

_LAYER_ROWS: Final = (
    (Stage.GLUE_IN, "hidden_states"),
    (Stage.ROUTE, "logits"),
    (Stage.ROUTE, "topk_ids"),
    (Stage.ROUTE, "topk_weights"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
    (Stage.GLUE_OUT, "hidden_states"),
)
_ROUTE_ROWS: Final = (
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.GEMM2, "output"),
)


def check_rerun(first: Subject, again: Subject, ledger: Ledger) -> None:
    """Compare two forwards of the same tokens on the same ranks, stage by stage, in every bit.

    Routes are compared where they lie in either run: their order inside an expert is free.

    Args:
        first: the earlier forward.
        again: the later one.
        ledger: of the later one.
    """
    ledger.ask(RERUN)
    for stage, name in _LAYER_ROWS:
        rows = again.own_rows if stage is Stage.GLUE_OUT else again.layer_rows
        got, want = (one.tensor_of(one.ranks, stage, name) for one in (again, first))
        _compare(stage, name, rows, got, want, ledger)
    orders = [_canonical_order(one) for one in (first, again)]
    if len(orders[0]) != len(orders[1]):
        return  # other routes, and reported as such
    for stage, name in _ROUTE_ROWS:
        got, want = (
            take_rows(one.route_tensor(stage, name), order)
            for one, order in ((again, orders[1]), (first, orders[0]))
        )
        _compare(stage, name, again.route_rows[orders[1]], got, want, ledger)


def _canonical_order(subject: Subject) -> Tensor:
    """[N] the routes of tokens among ``route_rows``, by rank, token and slot."""
    rows, top_k = subject.route_rows, subject.layer.top_k
    of_tokens = (rows.token != PADDING).nonzero()[:, 0]
    key = (rows.rank * (len(subject.hidden_states) + 1) + rows.token) * top_k + rows.slot
    return of_tokens[torch.argsort(key[of_tokens])]


def _compare(
    stage: Stage, name: str, rows: Rows, got: Tensor, want: Tensor, ledger: Ledger
) -> None:
    legal = bitwise_equal(got, want)
    if not bool(legal.all()):
        got, want = got.to(torch.float64), want.to(torch.float64)
        ledger.steps(RERUN, stage, name, rows, got=got, want=want, legal=legal)
