"""What ``standard`` promises: rows stay where they are, each rank computes its own routes."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.captured import where_captured
from reports.verdict.deviation import Deviation
from reports.verdict.formats.grouped_tokens import GroupedTokensView
from reports.verdict.formats.routes import local_slots
from reports.verdict.formats.token_rows import TOKEN_ROWS
from reports.verdict.formats.view import Axes, DueCall
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.stage_checks import ACCOUNTS
from reports.verdict.subject import Subject
from topology.sync import PADDING, Padding


class StandardView(GroupedTokensView):
    """See ``FormatView``."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {
                "physical_ids": ("T", "K"),
                "hidden_states": ("T", "D"),
                "topk_ids": ("T", "K"),
                "topk_weights": ("T", "K"),
            },
            **TOKEN_ROWS,
        }
    )

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """Every layer row, in place."""
        start = subject.layer_starts[rank]
        return torch.arange(start, start + len(subject.layer_tokens[rank]))

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A rank computes those of its own rows' routes whose slots it holds."""
        due = torch.zeros(subject.layer.world_size, subject.layer.slots_per_rank, dtype=torch.int64)
        local = _local_ids_due(subject, rank)
        due[rank] = torch.bincount(local[local >= 0], minlength=due.shape[1])
        return due

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """None: nothing travels between glue_in and tail."""
        return ()

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Every rank holds the same rows, so each route must go to the same slot on all of them.

        Each rank's choice may be legal by itself and a route still be computed twice, or nowhere.
        """
        for stage, name in ((Stage.ROUTE, "topk_ids"), (Stage.DISPATCH, "physical_ids")):
            mine, first = (subject.stage(stage, r)[name].to(torch.int64) for r in (rank, 0))
            wrong = (mine != first).nonzero()
            if wrong.numel():
                row, slot = wrong[0].tolist()
                token = int(subject.layer_tokens[rank][row])
                ledger.report(
                    Deviation(
                        check=ACCOUNTS,
                        stage=stage,
                        rank=rank,
                        tensor=name,
                        token=None if token == PADDING else token,
                        slot=slot,
                        got=float(mine[row, slot]),
                        want=float(first[row, slot]),
                        rows=len(torch.unique(wrong[:, 0])),
                        detail=f"{len(wrong)} routes go elsewhere than rank 0 sends them, which "
                        "has the same rows: some are computed twice, some nowhere",
                    )
                )
                return

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """Rows and weights are those of the route stage, ids made local."""
        for rank in subject.ranks:
            traced, rows = subject.stage(Stage.DISPATCH, rank), subject.rows_of([rank])
            due = {
                "hidden_states": partial(subject.dispatched_rows, [rank]),
                "topk_ids": partial(_local_ids_due, subject, rank),
                "topk_weights": partial(subject.tensor_of, [rank], Stage.ROUTE, "topk_weights"),
            }
            for name, of_route in due.items():
                with where_captured(ledger, f"dispatch/{name}", MOVES):
                    ledger.moved(Stage.DISPATCH, name, rows, got=traced[name], want=of_route())

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """The partial goes on as it is."""
        ledger.moved(
            Stage.COMBINE,
            "routed",
            subject.layer_rows,
            got=subject.layer_tensor(Stage.COMBINE, "routed"),
            want=subject.layer_tensor(Stage.POST_PERMUTE, "partial")[
                :, : subject.layer.hidden_size
            ],
        )


def _local_ids_due(subject: Subject, rank: int) -> Tensor:
    """[T, K] int32: slots of this rank by the physical ids; -1 on rows that lose their routes.

    Source: SGLang 0.5.21, SGLANG_OPT_MASK_DP_PAD_MOE: padding of equally long DP slots.
    """
    layer = subject.layer
    ids = local_slots(layer, rank, subject.stage(Stage.DISPATCH, rank)["physical_ids"])
    if layer.masks_slots and layer.sync.padding is Padding.MAX_LEN:
        ids = ids.masked_fill((subject.layer_tokens[rank] == PADDING)[:, None], -1)
    return ids.to(torch.int32)
