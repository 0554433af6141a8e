"""Where experts' segments lie among expanded rows, as one psum says."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpandedSegments:
    """Segments of L experts among C rows.

    start  [L] int64  first row: the first multiple of the alignment behind the segment before
    count  [L] int64  real rows; none where an end lies before the start
    slot   [C] int64  local slot of every real row, -1 = none
    """

    start: Tensor
    count: Tensor
    slot: Tensor

    @staticmethod
    def of(psum: Tensor, num_rows: int, alignment: int) -> "ExpandedSegments":
        """Read [L] psum: aligned start of each segment + its real rows."""
        ends = psum.to(torch.int64)
        start = torch.zeros_like(ends)
        start[1:] = rounded_up(ends[:-1], alignment)
        slot = torch.full((num_rows,), -1)
        for expert, (first, end) in enumerate(zip(start.tolist(), ends.tolist(), strict=True)):
            slot[max(first, 0) : max(end, 0)] = expert
        return ExpandedSegments(start=start, count=(ends - start).clamp_min(0), slot=slot)

    def slab_row(self, row: Tensor, height: int) -> Tensor:
        """[N] where real rows [N] stand in slabs laid end to end; -1 past the end of a slab."""
        slot = self.slot[row]
        in_slab = row - self.start[slot]
        return torch.where(in_slab < height, slot * height + in_slab, -1)

    def padded_slot(self, alignment: int) -> Tensor:
        """[C] int32: the slot of every row, padding of its segment included; -1 behind the last."""
        ends = rounded_up(self.start + self.count, alignment).tolist()
        padded = torch.full_like(self.slot, -1, dtype=torch.int32)
        for expert, (first, end) in enumerate(zip(self.start.tolist(), ends, strict=True)):
            padded[max(first, 0) : max(end, 0)] = expert
        return padded


def psum_due(routes: Tensor, alignment: int) -> Tensor:
    """[L] int64 psum of segments of so many routes [L]."""
    lengths = rounded_up(routes, alignment)
    return lengths.cumsum(0) - lengths + routes


def rounded_up(counts: Tensor, alignment: int) -> Tensor:
    """[L] multiples of the alignment."""
    return (counts + alignment - 1) // alignment * alignment
