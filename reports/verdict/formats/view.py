"""What a dispatch format promises: the seam between the common checks and one format's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.ledger import Ledger
from topology.mesh import Group

if TYPE_CHECKING:
    from reports.verdict.subject import Subject

Axes = tuple[str, ...]

BF16_BYTES: Final = 2
FP32_BYTES: Final = 4
ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DueCall:
    """One collective that a rank owes.

    payload_bytes  what it hands in
    """

    stage: Stage
    op: str
    group: Group
    payload_bytes: int


class FormatView(Protocol):
    """One format's part of the verdict. Letters as in ``readable.SHAPES``."""

    shapes: Mapping[Stage, Mapping[str, Axes]]
    """Tensors that stages ``dispatch`` and ``combine`` leave, with their axes."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype]
    """dtypes of what the format hands over."""

    quantised: Sequence[str]
    """Tensors of stage ``dispatch`` in the recipe's number format."""

    def received_from(self, subject: "Subject", rank: int) -> Tensor:
        """[R] int64: place among ``subject.layer_rows`` of every received row's source.

        Raises:
            UnreadableTraceError: a received row names no row of any rank.
        """
        ...

    def routes_due(self, subject: "Subject", rank: int) -> Tensor:
        """[P, L] int64: routes of each source rank that a rank's slots have to compute."""
        ...

    def calls_due(self, subject: "Subject", rank: int) -> Sequence[DueCall]:
        """Collectives of the format in one forward, in order."""
        ...

    def check_arrivals(self, subject: "Subject", rank: int, ledger: Ledger) -> None:
        """Account: each token is where it should be, once."""
        ...

    def check_groups(self, subject: "Subject", rank: int, ledger: Ledger) -> None:
        """Contract: counts, segments and padding of the grouped rows."""
        ...

    def check_dispatch(self, subject: "Subject", ledger: Ledger) -> None:
        """Own error of stage dispatch."""
        ...

    def check_pre_permute(self, subject: "Subject", ledger: Ledger) -> None:
        """Own error of stage pre_permute beyond the move of the rows themselves."""
        ...

    def check_combine(self, subject: "Subject", ledger: Ledger) -> None:
        """Own error of stage combine."""
        ...
