"""Whether a topology's plan places every token: the one thing all row maps rest on.

Ranks and verdict read the same plan, so a plan that loses a token would lose it in both.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from moe.formats import Stage
from reports.verdict.layer import JudgedLayer
from reports.verdict.readable import UnreadableTraceError
from topology.sync import PADDING


def check_plan(layer: JudgedLayer) -> None:
    """Each token enters on the ranks of its group, and is computed as often as the flow says.

    Raises:
        UnreadableTraceError: a token stands in no row, or in too many.
    """
    attention = layer.layout.attention
    ends = list(accumulate(layer.tokens))
    for place, (end, count) in enumerate(zip(ends, layer.tokens, strict=True)):
        for tp_rank in range(attention.degree("tp")):
            ranks = [
                rank
                for rank in range(layer.world_size)
                if (attention.coord(rank, "dp"), attention.coord(rank, "tp")) == (place, tp_rank)
            ]
            rows = [layer.sync.entry[rank] for rank in ranks]
            _expect_each(rows, range(end - count, end), 1, ranks[0], "enters")
    every = range(sum(layer.tokens))
    if layer.is_all_to_all:
        # Beside context parallelism the ranks that hold equal rows do not share them out.
        copies = attention.degree("tp") if attention.degree("cp") > 1 else 1
        _expect_each(layer.sync.layer, every, copies, 0, "is computed")
    else:
        for rank, row in enumerate(layer.sync.layer):
            _expect_each([row], every, 1, rank, "is computed")


def _expect_each(
    rows: Sequence[Sequence[int]], tokens: range, times: int, rank: int, what: str
) -> None:
    held = Counter(token for row in rows for token in row if token != PADDING)
    if held != Counter(dict.fromkeys(tokens, times)):
        wrong = min(t for t in {*held, *tokens} if held[t] != (times if t in tokens else 0))
        detail = f"by the plan token {wrong} {what} {held[wrong]} times, {times} is due"
        raise UnreadableTraceError(rank, Stage.GLUE_IN, detail)
