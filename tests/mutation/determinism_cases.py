"""Faults that leave one forward right, and what they do to the bits of a token in another one."""

from dataclasses import dataclass

from moe.formats import Stage
from reports.verdict.determinism import BATCH, RERUN
from tests.mutation.cases import Case


@dataclass(frozen=True)
class Lost(Case):
    """A fault that is found because bits are lost: ``check`` is the question that finds it."""

    check: str = RERUN

    def __str__(self) -> str:
        return f"{self.fault} in {self.world}"


FEW_ROWS = "tile_depends_on_batch:rows=4"
"""Fewer than the rank has: a token alone goes through the other kernel."""

LOSES_BITS = (
    Lost("sum_order_varies", "a2a", Stage.ROUTE, 2),
    Lost("sum_order_varies", "slabs", Stage.ROUTE, 1),
    Lost("sum_order_varies:rank=3", "flashinfer decode", Stage.ROUTE, 3),
    Lost(FEW_ROWS, "a2a", Stage.ROUTE, 2, check=BATCH),
    Lost(FEW_ROWS, "slabs", Stage.ROUTE, 1, check=BATCH),
    Lost("stale_row", "slabs ll", Stage.DISPATCH, 2, check=BATCH),
    Lost("combine_slot_stale", "slabs ll", Stage.COMBINE, 2, check=BATCH),
    Lost("reduced_sum_stale", "tp", Stage.TAIL, 1, check=BATCH),
)

KEEPS_BITS = Case("tile_depends_on_batch:rows=0", "a2a", Stage.ROUTE, 2)
