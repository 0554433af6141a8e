"""Formats whose received rows are routes: nothing has to be found again behind the experts."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from reports.verdict.formats.exchange import routes_to_owner
from reports.verdict.subject import Subject


class RouteRowsView:
    """See ``FormatView``: a received row belongs to one expert, and is its own grouped row."""

    quantised: Sequence[str] = ()
    folds_factor = False
    stores_weights = False
    low_latency_wire = False

    def id_limits(self, subject: Subject) -> Mapping[str, int]:
        """Received rows carry no ids."""
        return {}

    def combined(self, subject: Subject, rank: int) -> tuple[Tensor, Tensor]:
        """Every route that has a grouped row."""
        placed = subject.placed[rank]
        return placed.received, placed.local

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A route is due on the rank that owns its slot, wherever its token is."""
        return routes_to_owner(subject, rank)

    def live_rows_due(self, subject: Subject, rank: int) -> Tensor:
        """The grouped rows of the routes."""
        return subject.routes[rank].row.sort().values
