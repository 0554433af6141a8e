"""One MoE layer's weights, read from a published checkpoint when they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import GROUP_SIZE, quantize_blocks
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights
from scenarios.checkpoint_files import (
    CheckpointError,
    TensorProblem,
    TensorReader,
    stored_tensors,
    tensor_files,
)
from scenarios.checkpoint_layer import StoredLayer, StoredMatrix, StoredMlp, fit_layer
from scenarios.checkpoint_names import find_layer
from scenarios.models import MoeModel
from scenarios.sections import WeightsSpec

__all__ = ["CheckpointError", "CheckpointWeights", "TensorProblem", "open_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of one layer of a checkpoint; every call opens the files that it needs.

    bf16 experts under fp8_block128 are quantised into blocks with fp32 scales as they are read,
    like synthetic ones. See ``moe.weights.WeightSource``.

    path    as the scenario names it
    layer   position in the model
    recipe  bf16 or fp8_block128
    stored  where each tensor lies
    """

    path: str
    layer: int
    recipe: QuantRecipe
    stored: StoredLayer

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """These experts, nothing else is read.

        Raises:
            CheckpointError: a file has gone since the checkpoint was opened.
        """
        with TensorReader() as reader:
            return self._in_recipe(reader, [self.stored.routed[expert] for expert in expert_ids])

    def common(self) -> CommonWeights:
        """Shared expert, router weight as stored, correction bias widened to fp32, hash table.

        Raises:
            CheckpointError: a file has gone since the checkpoint was opened, or a hash table
                names an expert that does not exist.
        """
        shared, bias = self.stored.shared, self.stored.correction_bias
        with TensorReader() as reader:
            return CommonWeights(
                shared=self._in_recipe(reader, [shared]) if shared else None,
                gate_weight=reader.read(self.stored.gate_weight),
                correction_bias=reader.read(bias).to(torch.float32) if bias else None,
                tid2eid=self._table(reader),
            )

    def _table(self, reader: TensorReader) -> Tensor | None:
        """[V, K] int32 experts of each vocabulary id, in a hash layer."""
        stored = self.stored.hash_table
        if stored is None:
            return None
        table = reader.read(stored).to(torch.int32)
        num_experts = len(self.stored.routed)
        unknown = ((table < 0) | (table >= num_experts)).nonzero()
        if unknown.numel():
            row, slot = unknown[0].tolist()
            detail = f"id {row} names expert {int(table[row, slot])} of {num_experts}"
            raise CheckpointError(self.path, [TensorProblem(stored.file, stored.name, detail)])
        return table

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """The stored values, fp8 codes times their scale in float64."""
        return _ideal(self.stored.routed[expert_id])

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The stored values, fp8 codes times their scale in float64."""
        return _ideal(self.stored.shared) if self.stored.shared else None

    def _in_recipe(self, reader: TensorReader, mlps: Sequence[StoredMlp]) -> ExpertWeights:
        w13 = [_joined([self._matrix(reader, part) for part in mlp.w13], dim=1) for mlp in mlps]
        w2 = [self._matrix(reader, mlp.w2) for mlp in mlps]
        return ExpertWeights(w13=_joined(w13, dim=0), w2=_joined(w2, dim=0))

    def _matrix(self, reader: TensorReader, matrix: StoredMatrix) -> ExpertMatrix:
        """One matrix as that of a single expert, [1, N, K]."""
        values = reader.read(matrix.values, matrix.expert)[None]
        if matrix.scale is not None:
            scale = reader.read(matrix.scale, matrix.expert)[None]
            return ExpertMatrix(values=values, scale=scale.to(torch.float32))
        if self.recipe is QuantRecipe.BF16:
            return ExpertMatrix(values=values, scale=None)
        blocks = quantize_blocks(values, ScaleFormat.FP32)
        return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)


def open_checkpoint(
    spec: WeightsSpec, model: MoeModel, recipe: QuantRecipe, *, hashed: bool = False
) -> CheckpointWeights:
    """Find a layer in a checkpoint and check its names, shapes and dtypes; reads headers alone.

    Args:
        spec: of kind ``safetensors``; its path is a file, an index, or a directory.
        model: the sizes wanted.
        recipe: bf16 or fp8_block128.
        hashed: a layer that routes by token id.

    Raises:
        CheckpointError: no such layer, two candidates for it, or tensors that do not fit the
            model and the recipe; all of them are listed.
    """
    assert spec.path is not None
    assert spec.layer is not None, "the schema demands path and layer with kind safetensors"
    checkpoint = Path(spec.path)
    files = tensor_files(checkpoint)
    layer = find_layer(files, spec.layer, checkpoint)
    stored, problems = stored_tensors({name: files[name] for name in layer.names.values()})
    fitted, misfits = fit_layer(layer, stored, model, recipe, hashed=hashed)
    if problems or misfits:
        raise CheckpointError(spec.path, problems + misfits)
    return CheckpointWeights(path=spec.path, layer=spec.layer, recipe=recipe, stored=fitted)


def _joined(matrices: Sequence[ExpertMatrix], *, dim: int) -> ExpertMatrix:
    """Experts end to end (dim 0), or rows of one expert (dim 1: blocks of rows must be whole)."""
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    return ExpertMatrix(
        values=torch.cat([matrix.values for matrix in matrices], dim),
        scale=torch.cat(scales, dim) if scales else None,
    )


def _ideal(mlp: StoredMlp) -> tuple[Tensor, Tensor]:
    with TensorReader() as reader:
        w13 = torch.cat([_exact(reader, part) for part in mlp.w13])
        return w13, _exact(reader, mlp.w2)


def _exact(reader: TensorReader, matrix: StoredMatrix) -> Tensor:
    """[N, K] float64; the product of an e4m3 code and an fp32 scale is exact in it."""
    values = reader.read(matrix.values, matrix.expert).to(torch.float64)
    if matrix.scale is None:
        return values
    scale = reader.read(matrix.scale, matrix.expert).to(torch.float64)
    spread = scale.repeat_interleave(GROUP_SIZE, -2).repeat_interleave(GROUP_SIZE, -1)
    return values * spread[: values.shape[-2], : values.shape[-1]]
