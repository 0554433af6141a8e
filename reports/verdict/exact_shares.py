"""How much of each stage exact mode compares: counted as it is compared, never assumed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.exact_compared import Compared


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Of a stage's compared cells.

    certified  share that can hold one value only
    void       of all: certified and an ideal zero, in which a fault that scales cannot show
    coded      share that are codes or scales
    """

    certified: float
    void: float
    coded: float = 0.0

    @staticmethod
    def of(want: Tensor, is_certain: Tensor) -> "StageShare":
        """Of [...] values."""
        share = is_certain.to(torch.float64).mean()
        void = (is_certain & (want == 0)).to(torch.float64).mean()
        return StageShare(certified=float(share), void=float(void))


@dataclass(slots=True)
class Shares:
    """Counts the cells of what passes through, stage by stage.

    counts  stage -> [cells, certified, void, coded]
    """

    counts: dict[Stage, list[int]] = field(default_factory=dict)

    def counting(self, compared: Iterable[Compared]) -> Iterator[Compared]:
        """The same, each counted."""
        for one in compared:
            cells, count = one.want.numel(), self.counts.setdefault(one.stage, [0, 0, 0, 0])
            count[0] += cells
            count[1] += int(one.is_certain.count_nonzero())
            count[2] += int((one.is_certain & (one.want == 0)).count_nonzero())
            count[3] += cells if one.is_coded else 0
            yield one

    def by_stage(self) -> Mapping[Stage, StageShare]:
        """Of every stage of which a cell was there to be compared."""
        return {
            stage: StageShare(certified=certified / cells, void=void / cells, coded=coded / cells)
            for stage, (cells, certified, void, coded) in self.counts.items()
            if cells
        }
