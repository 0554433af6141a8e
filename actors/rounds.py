"""Several forwards on the same buffers: token lists A, B, A, B, and what has to be equal again."""

from collections.abc import Sequence

from torch import Tensor

from actors.result_rows import ModeRun
from moe.batch import Batch
from reports.verdict.judge import Judge


def batch_of_round(batch: Batch, number: int) -> Batch:
    """List A in every other round, in between list B: A rotated by half its length.

    A slot that keeps what the round before left holds another token's data then, and list A comes
    again to be compared with itself.
    """
    if number % 2 == 0:
        return batch
    shift = batch.hidden_states.shape[0] // 2

    def rotated(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.roll(shift, dims=0)

    return Batch(
        hidden_states=batch.hidden_states.roll(shift, dims=0),
        input_ids=rotated(batch.input_ids),
        topk_ids=rotated(batch.topk_ids),
        topk_weights=rotated(batch.topk_weights),
    )


def compare_rounds(judge: Judge, runs: Sequence[ModeRun]) -> None:
    """Enter into each round's ledger where it differs from an earlier round of the same list.

    Args:
        judge: has judged each round by itself.
        runs: the rounds of one mode, in order.
    """
    for first, again in zip(runs, runs[2:], strict=False):
        before, now = ([report.trace for report in run.reports] for run in (first, again))
        judge.check_rerun(again.batch, before, now, again.judgement.ledger)
