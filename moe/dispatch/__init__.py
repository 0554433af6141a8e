"""Dispatchers: one a format, each with both directions."""

from typing import Any, Protocol

from torch import Tensor

from moe.stages import CombineInput, CombineOutput, PhysicalIds


class Dispatcher(Protocol):
    """Moves tokens to their experts' ranks and their partial results back."""

    def dispatch(  # each format has an output type of its own
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> Any:  # noqa: ANN401
        """[T, H] rows with [T, K] ids and weights -> the format's dispatch output.

        The output has a ``handle``, the way back that ``combine`` takes.
        """
        ...

    def combine(self, partials: CombineInput, handle: Any) -> CombineOutput:  # noqa: ANN401
        """[R, H] partials -> [T, H] rows of the tokens that ``dispatch`` was given."""
        ...
