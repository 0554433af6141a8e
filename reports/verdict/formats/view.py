"""What a dispatch format promises: the seam between the common checks and one format's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores
from reports.verdict.ledger import Ledger
from topology.mesh import Group

if TYPE_CHECKING:
    from reports.verdict.subject import RankRoutes, Subject

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
    """One format's part of the verdict, for one layer. Letters as in ``readable.SHAPES``.

    What formats have in common is in two bases: ``TokenRowsView``, where a received row is a token
    with the ids of its routes, and ``RouteRowsView``, where it is one route.
    """

    shapes: Mapping[Stage, Mapping[str, Axes]]
    """Tensors that the format leaves, with their axes."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype]
    """dtypes of what the format hands over."""

    quantised: Sequence[str]
    """Tensors of stage ``dispatch`` in the recipe's number format."""

    folds_factor: bool
    """Whether the routed scaling factor is part of post-permute's sum, not of the tail."""

    partials: PartialStores
    """What is stored of a token's weighted routes before combine adds them up."""

    stores_weights: bool
    """Whether top-k weights are rounded to bf16 in front of the product."""

    low_latency_wire: bool
    """Whether the wire is quantised with the larger floor of the low-latency kernels."""

    def id_limits(self, subject: "Subject") -> Mapping[str, int]:
        """Tensors of stage ``dispatch`` with ids of received rows: -1 up to under a limit."""
        ...

    def received_from(self, subject: "Subject", rank: int) -> Tensor:
        """[R] int64: place among ``subject.layer_rows`` of every received row's source.

        -1 of a row that holds no layer row of any rank.

        Raises:
            UnreadableTraceError: a received row names a row that does not exist.
        """
        ...

    def routes(self, subject: "Subject", rank: int) -> "RankRoutes":
        """The routes a rank computes, of received rows that have a source."""
        ...

    def combined(self, subject: "Subject", rank: int) -> tuple[Tensor, Tensor]:
        """([N] received row, [N] local slot) of every route that post-permute hands on."""
        ...

    def routes_due(self, subject: "Subject", rank: int) -> Tensor:
        """[P, L] int64: routes of each source rank that a rank's slots have to compute."""
        ...

    def live_rows_due(self, subject: "Subject", rank: int) -> Tensor:
        """[V] int64: grouped rows of the contiguous layout that are worth computing, ascending."""
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
        """Own error of stage pre_permute, but for the expert that each route's row meets."""
        ...

    def check_post_permute(self, subject: "Subject", ledger: Ledger) -> None:
        """Own error of stage post_permute."""
        ...

    def check_combine(self, subject: "Subject", ledger: Ledger) -> None:
        """Own error of stage combine."""
        ...
