"""Several forwards on the same buffers: token lists A, B, A, B, and what has to be equal again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.result_rows import ModeRun
from moe.batch import Batch
from moe.trace import RankTrace
from reports.verdict.judge import Judge


def batch_of_round(batch: Batch, number: int) -> Batch:
    """List A in every other round, in between list B: ``list_b`` of it."""
    return batch if number % 2 == 0 else tokens_of(batch, list_b(len(batch.hidden_states)))


def list_b(num_tokens: int) -> Tensor:
    """[T] int64: which token of list A stands in each place of list B.

    A rotated by half its length, with one token in place of every third: other data in every row,
    and other numbers of rows for the experts, so that whatever keeps a row or a count of the round
    before is wrong. Then list A comes again, to be compared with itself.
    """
    order = torch.arange(num_tokens).roll(num_tokens // 2)
    order[::3] = order[:1].clone()
    return order


def tokens_of(batch: Batch, order: Tensor) -> Batch:
    """These tokens of a list, in this order, with what is pinned for them."""

    def taken(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[order]

    return Batch(
        hidden_states=batch.hidden_states[order],
        input_ids=taken(batch.input_ids),
        topk_ids=taken(batch.topk_ids),
        topk_weights=taken(batch.topk_weights),
    )


def diagnose_rounds(judge: Judge, runs: Sequence[ModeRun]) -> Iterator[ModeRun]:
    """The rounds of one mode with a diagnosis for each of their deviations.

    Args:
        judge: has judged each round, and compared them.
        runs: the rounds of one mode, in order.
    """
    for before, run in zip((None, *runs), runs, strict=False):
        earlier = None if before is None else (before.batch, _traces(before))
        ledger = run.judgement.ledger
        yield replace(run, diagnoses=judge.diagnose(run.batch, _traces(run), ledger, earlier))


def _traces(run: ModeRun) -> list[RankTrace]:
    return [report.trace for report in run.reports]


def compare_rounds(judge: Judge, runs: Sequence[ModeRun]) -> None:
    """Enter into each round's ledger where it differs from an earlier round of the same list.

    Args:
        judge: has judged each round by itself.
        runs: the rounds of one mode, in order.
    """
    for first, again in zip(runs, runs[2:], strict=False):
        subject = judge.subject(again.batch, _traces(first))
        judge.check_rerun(subject, _traces(again), again.judgement.ledger)
