"""A tap sees every stage's output: a recorder, a fault, or both."""

from typing import Protocol, TypeVar

from moe.formats import Stage

V = TypeVar("V")


class Tap(Protocol):
    """Called with what a stage produced; what it returns is what the next stage gets."""

    def __call__(self, stage: Stage, value: V) -> V:
        """The value to go on with, of the same type."""
        ...
