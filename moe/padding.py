"""Experts whose sizes are padded with zeros to what their kernels take; the padding never returns.

Rows get columns of zeros in front of dispatch, and combine's result loses them again. The experts'
matrices get zeros to match, once, as they are loaded: no product changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, WeightSource


def pad_columns(rows: Tensor, width: int) -> Tensor:
    """[T, C] with zeros behind up to ``width`` columns; itself where it has as many."""
    missing = width - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedWeights:
    """A source whose routed experts are padded; see ``moe.weights.WeightSource``.

    source             the experts as they are
    hidden_size        H after padding
    intermediate_size  I after padding

    Source: SGLang 0.5.21, quantization/mxfp4.py::Mxfp4MoEMethod.create_weights.
    """

    source: WeightSource
    hidden_size: int
    intermediate_size: int

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """Checkpoint tensors of these experts with zeros around them."""
        weights = self.source.experts(expert_ids)
        return ExpertWeights(
            w13=_padded(weights.w13, 2, self.intermediate_size, self.hidden_size),
            w2=_padded(weights.w2, 1, self.hidden_size, self.intermediate_size),
        )

    def common(self) -> CommonWeights:
        """As it is: the router sees rows without padding."""
        return self.source.common()

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """Unrounded values with zeros around them."""
        w13, w2 = self.source.ideal_expert(expert_id)
        return (
            _grown(w13[None], 2, self.intermediate_size, self.hidden_size)[0],
            _grown(w2[None], 1, self.hidden_size, self.intermediate_size)[0],
        )

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """As it is."""
        return self.source.ideal_shared()


def _padded(matrix: ExpertMatrix, parts: int, rows: int, columns: int) -> ExpertMatrix:
    """``parts`` matrices on each other's rows, each padded to [rows, columns], scales included."""
    cells_a_column = matrix.in_features // matrix.values.shape[-1]
    values = _grown(matrix.values, parts, rows, columns // cells_a_column)
    if matrix.scale is None:
        return replace(matrix, values=values)
    assert matrix.scale.dtype == torch.uint8, "only groups of columns are padded"
    scale = _grown(matrix.scale, parts, rows, columns // matrix.group_size)
    return replace(matrix, values=values, scale=scale)


def _grown(cells: Tensor, parts: int, rows: int, columns: int) -> Tensor:
    """[L, parts * N, C] to [L, parts * rows, columns] with zeros."""
    by_part = cells.view(len(cells), parts, -1, cells.shape[-1])
    missing = (0, columns - cells.shape[-1], 0, rows - by_part.shape[2])
    return pad(by_part, missing).flatten(1, 2)
