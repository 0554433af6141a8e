"""What ``standard`` promises: rows stay where they are, each rank computes its own routes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import GemmLayout, Stage
from reports.verdict.formats.routes import check_output_index, local_slots
from reports.verdict.formats.token_rows import TOKEN_ROWS, TokenRowsView
from reports.verdict.formats.view import Axes, DueCall
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import ACCOUNTS, CONTRACT, StageChecks, broken
from reports.verdict.subject import Subject
from topology.sync import PADDING

SLAB_STEP = 256


class StandardView(TokenRowsView):
    """See ``FormatView``."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {
                "physical_ids": ("T", "K"),
                "hidden_states": ("T", "H"),
                "topk_ids": ("T", "K"),
                "topk_weights": ("T", "K"),
            },
            **TOKEN_ROWS,
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            (Stage.DISPATCH, "topk_ids"): torch.int32,
            (Stage.DISPATCH, "topk_weights"): torch.float32,
            (Stage.DISPATCH, "hidden_states"): torch.bfloat16,
            (Stage.PRE_PERMUTE, "rows.m_indices"): torch.int32,
            (Stage.PRE_PERMUTE, "rows.masked_m"): torch.int32,
            (Stage.PRE_PERMUTE, "restore.output_index"): torch.int32,
        }
    )

    quantised: Sequence[str] = ()
    folds_factor = True

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """Every layer row, in place."""
        start = subject.layer_starts[rank]
        return torch.arange(start, start + len(subject.layer_tokens[rank]))

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A rank computes those of its own rows' routes whose slots it holds."""
        due = torch.zeros(subject.layer.world_size, subject.layer.slots_per_rank, dtype=torch.int64)
        ids = subject.stage(Stage.DISPATCH, rank)["physical_ids"]
        local = local_slots(subject.layer, rank, ids)
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

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Segments aligned with -1 on padding up to the bound, or slabs of the rule's height."""
        if subject.layer.gemm_layout is GemmLayout.MASKED:
            self._check_slabs(subject, rank, ledger)
        else:
            self._check_segments(subject, rank, ledger)
        check_output_index(subject, rank, ledger)

    def _counts(self, subject: Subject, rank: int) -> Tensor:
        return torch.bincount(subject.routes[rank].local, minlength=subject.layer.slots_per_rank)

    def _check_slabs(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        traced = subject.stage(Stage.PRE_PERMUTE, rank)
        due = self._counts(subject, rank)
        for slot in (traced["rows.masked_m"] != due).nonzero()[:, 0].tolist():
            got, want = int(traced["rows.masked_m"][slot]), int(due[slot])
            ledger.report(
                Deviation(
                    check=CONTRACT,
                    stage=Stage.PRE_PERMUTE,
                    rank=rank,
                    tensor="rows.masked_m",
                    expert=subject.layer.local_experts(rank)[slot],
                    got=float(got),
                    want=float(want),
                    detail=f"masked_m is {got} for {want} routes",
                )
            )
        height = traced["rows.hidden_states"].shape[1]
        due_height = (len(subject.layer_tokens[rank]) // SLAB_STEP + 1) * SLAB_STEP
        if height != due_height:
            detail = f"slabs of {height} rows, {due_height} are due"
            broken(ledger, Stage.PRE_PERMUTE, rank, "rows.hidden_states", detail)

    def _check_segments(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        counts, block = self._counts(subject, rank).tolist(), subject.layer.row_alignment
        due = []
        for slot, count in enumerate(counts):
            due += [slot] * count + [-1] * (-count % block)
        routes = subject.stage(Stage.ROUTE, rank)["topk_ids"].numel()
        due += [-1] * (rows_at_most(routes, len(counts), block) - len(due))
        m_indices = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"].tolist()
        if m_indices != due:
            detail = f"{len(m_indices)} rows that are not segments of {counts} in steps of {block}"
            broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """Rows and weights are those of the route stage, ids made local."""
        for rank in subject.ranks:
            traced, rows = subject.stage(Stage.DISPATCH, rank), subject.rows_of([rank])
            ids = local_slots(subject.layer, rank, traced["physical_ids"])
            for name, want in (
                ("hidden_states", subject.stage(Stage.GLUE_IN, rank)["hidden_states"]),
                ("topk_ids", ids.to(torch.int32)),
                ("topk_weights", subject.stage(Stage.ROUTE, rank)["topk_weights"]),
            ):
                ledger.moved(Stage.DISPATCH, name, rows, got=traced[name], want=want)

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's grouped row is its token's row, by the quantiser rule."""
        for rank in subject.ranks:
            placed = subject.placed[rank]
            checks = StageChecks(ledger, Stage.PRE_PERMUTE, subject.layer, placed.rows)
            source = take_rows(
                subject.stage(Stage.DISPATCH, rank)["hidden_states"], placed.received
            )
            name = "rows.hidden_states"
            values = take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, name), placed.row)
            scale = None
            if f"{name}_scale" in subject.stage(Stage.PRE_PERMUTE, rank):
                scales = subject.grouped(Stage.PRE_PERMUTE, rank, f"{name}_scale")
                scale = take_rows(scales, placed.row)
            checks.quantised(name, values, scale, source)
            self.check_restore(subject, rank, ledger)

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """The partial goes on as it is."""
        ledger.moved(
            Stage.COMBINE,
            "routed",
            subject.layer_rows,
            got=subject.layer_tensor(Stage.COMBINE, "routed"),
            want=subject.layer_tensor(Stage.POST_PERMUTE, "partial"),
        )


def rows_at_most(routes: int, slots: int, block: int) -> int:
    """Grouped rows that hold any distribution of ``routes`` over ``slots`` in whole blocks.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_get_compact_all_tokens.
    """
    started = min(routes, slots)
    return block * (started + (routes - started) // block)
