"""How a run of rows is cut into chunks, one or two a rank: integers only."""

from itertools import accumulate

Rows = tuple[int, ...]
"""Global token of each row, ``PADDING`` where there is none."""

PADDING = -1
"""Stands for a token where a row is padding."""


def align(count: int, alignment: int) -> int:
    """``count`` rounded up to a multiple of ``alignment``."""
    return -(-count // alignment) * alignment


def padded(rows: Rows, length: int) -> Rows:
    """``rows`` with padding after them, ``length`` in all."""
    return rows + (PADDING,) * (length - len(rows))


def tensor_split_sizes(num_rows: int, num_chunks: int) -> tuple[int, ...]:
    """Rows of each chunk: the first ``num_rows mod num_chunks`` are one longer, some may be empty.

    Source: PyTorch, torch.tensor_split.
    """
    short, longer = divmod(num_rows, num_chunks)
    return (short + 1,) * longer + (short,) * (num_chunks - longer)


def tensor_split(rows: Rows, num_chunks: int) -> tuple[Rows, ...]:
    """Chunks of the sizes above, in order."""
    sizes = tensor_split_sizes(len(rows), num_chunks)
    return tuple(rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))


def cp_shares(rows: Rows, cp: int, *, zigzag: bool) -> tuple[Rows, ...]:
    """Rows of a sequence that each context-parallel rank holds, in its own order.

    Zigzag cuts ``2 * cp`` blocks and gives rank i the blocks i and ``2 * cp - 1 - i``: under a
    causal mask every rank then attends to about as much. Otherwise rank i has the i-th of ``cp``.

    Source: SGLang 0.5.21, layers/utils/cp_utils.py::cp_split_and_rebuild_data.
    """
    if not zigzag:
        return tensor_split(rows, cp)
    blocks = tensor_split(rows, 2 * cp)
    return tuple(blocks[i] + blocks[2 * cp - 1 - i] for i in range(cp))
