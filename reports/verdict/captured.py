"""Traces that hold part of a forward: what asks for the rest is put aside, with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor

from moe.formats import Stage
from moe.trace import RankTrace
from reports.verdict.deviation import NotAsked
from reports.verdict.ledger import Ledger


class NotCapturedError(LookupError):
    """A check asks for a tensor that the trace does not hold."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage, name)
        self.stage = stage
        self.name = name

    def __str__(self) -> str:
        return f"{self.stage}/{self.name} was not captured"


class CapturedTensors(dict[str, Tensor]):
    """Tensors of one stage; one that is not there is not captured.

    Args:
        stage: whose they are.
        tensors: by name.
    """

    def __init__(self, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._stage = stage
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self._asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """As of any mapping, and counted as asked for."""
        self._asked.add(name)
        return super().get(name, default)

    @property
    def unread(self) -> list[str]:
        """Names of tensors that nobody asked for."""
        return [name for name in self if name not in self._asked]

    def __missing__(self, name: str) -> NoReturn:
        raise NotCapturedError(self._stage, name)


def as_captured(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The same traces with all stages, those that were not captured empty."""
    return [
        RankTrace(
            rank=trace.rank,
            stages={stage: CapturedTensors(stage, trace.stages.get(stage, {})) for stage in Stage},
            has_strides=trace.has_strides,
        )
        for trace in traces
    ]


def unread_tensors(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """``stage/name`` of every captured tensor that nobody has asked for so far, of any rank.

    Args:
        traces: as ``as_captured`` made them.
    """
    unread = {
        f"{stage}/{name}": None
        for trace in traces
        for stage, tensors in trace.stages.items()
        if isinstance(tensors, CapturedTensors)
        for name in tensors.unread
    }
    return tuple(unread)


@contextmanager
def where_captured(ledger: Ledger, what: Stage | str, *checks: str) -> Iterator[None]:
    """Leave the block at the first tensor that was not captured, and note it for the checks.

    Args:
        ledger: takes the note.
        what: the stage, or the part of the checks, that is not judged then.
        checks: who would have looked.
    """
    try:
        yield
    except NotCapturedError as missing:
        for check in checks:
            ledger.put_aside(NotAsked(check=check, what=str(what), why=str(missing)))
