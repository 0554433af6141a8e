"""The verbs over torch.distributed: gloo and NCCL are one class."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from topology.collectives import expect_rows, ordered_sum, place_in_group
from topology.mesh import Group
from topology.splits import tensor_split_sizes


class DistributedCollectives:
    """One rank's view of a torch.distributed world; see ``Collectives``.

    Rows travel as bytes: gloo refuses float8, and a move needs no arithmetic.

    Args:
        world: all ranks; the default process group must span them.
        groups: every group that will be used; all ranks pass the same list in the same order.

    Raises:
        ValueError: a group is not in ascending order, the only one torch.distributed knows.
    """

    def __init__(self, world: Group, groups: Sequence[Group]) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if self.world_size != len(world):
            raise RuntimeError(f"the process group has {self.world_size} ranks, not {len(world)}")
        unordered = [list(group) for group in groups if list(group) != sorted(group)]
        if unordered:
            raise ValueError(f"ranks of a group must ascend, got {unordered[0]}")
        self._groups = {
            group: dist.group.WORLD if group == world else dist.new_group(list(group))
            for group in dict.fromkeys(groups)
        }

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        expect_rows("all_gather_v", rows, counts[place_in_group("all_gather_v", self.rank, group)])
        sizes = [rows.shape[0]] * len(group)
        return self.all_to_all_v(torch.cat([rows] * len(group)), sizes, counts, group)

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """See ``Collectives``."""
        expect_rows("all_to_all_v", rows, sum(send_counts))
        sent = _as_bytes(rows)
        received = sent.new_empty((sum(recv_counts), sent.shape[1]))
        dist.all_to_all_single(
            received, sent, list(recv_counts), list(send_counts), group=self._groups[group]
        )
        return received.view(rows.dtype).view(sum(recv_counts), *rows.shape[1:])

    def all_reduce(self, rows: Tensor, group: Group) -> Tensor:
        """See ``Collectives``; every member adds a share of the rows, so each moves only twice."""
        shares = tensor_split_sizes(rows.shape[0], len(group))
        return self.all_gather_v(self.reduce_scatter_v(rows, shares, group), shares, group)

    def reduce_scatter_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``; moves alone, as the backends' own sums have no declared order."""
        here = place_in_group("reduce_scatter_v", self.rank, group)
        expect_rows("reduce_scatter_v", rows, sum(counts))
        received = self.all_to_all_v(rows, counts, [counts[here]] * len(group), group)
        return ordered_sum(received.tensor_split(len(group)))


def _as_bytes(rows: Tensor) -> Tensor:
    """[N, ...] of any dtype as [N, bytes of a row] uint8.

    ``contiguous()`` is not enough: it keeps the odd stride of a single column.
    """
    copy = rows.clone(memory_format=torch.contiguous_format)
    return copy.view(rows.shape[0], prod(rows.shape[1:])).view(torch.uint8)
