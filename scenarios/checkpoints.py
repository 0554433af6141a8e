"""One MoE layer's weights, read from a published checkpoint when they are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe.formats import QuantRecipe
from moe.recipes import RECIPES, WeightFormat
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights
from scenarios.checkpoint_checks import check_values
from scenarios.checkpoint_files import (
    CheckpointError,
    StoredTensor,
    TensorProblem,
    TensorReader,
    stored_tensors,
    tensor_files,
)
from scenarios.checkpoint_layer import StoredLayer, StoredMlp, fit_layer
from scenarios.checkpoint_names import find_layer
from scenarios.checkpoint_values import exact_matrix, read_matrix
from scenarios.models import MoeModel
from scenarios.sections import WeightsSpec

__all__ = ["CheckpointError", "CheckpointWeights", "TensorProblem", "open_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of one layer of a checkpoint; every call opens the files that it needs.

    bf16 experts under an fp8 recipe are quantised as they are read, like synthetic ones; under
    mxfp8 load-time preparation quantises them. See ``moe.weights.WeightSource``.

    path                 as the scenario names it
    layer                position in the model
    recipe               decides the form of the experts, and of the shared one
    stored               where each tensor lies
    power_of_two_scales  as of ``SyntheticWeights``, where bf16 experts are quantised
    """

    path: str
    layer: int
    recipe: QuantRecipe
    stored: StoredLayer
    power_of_two_scales: bool = False

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """These experts, nothing else is read.

        Raises:
            CheckpointError: a file has gone since the checkpoint was opened, or numbers in it make
                no weights.
        """
        mlps = [self.stored.routed[expert] for expert in expert_ids]
        with TensorReader() as reader:
            return self._in_form(reader, mlps, self._routed_form)

    def common(self) -> CommonWeights:
        """Shared expert, router weight as stored, correction bias widened to fp32, hash table.

        Raises:
            CheckpointError: a file has gone since the checkpoint was opened, numbers in it make no
                weights, or a hash table names an expert that does not exist.
        """
        shared, bias = self.stored.shared, self.stored.correction_bias
        with TensorReader() as reader:
            return CommonWeights(
                shared=self._in_form(reader, [shared], self._shared_form) if shared else None,
                gate_weight=_finite(reader, self.stored.gate_weight),
                correction_bias=_finite(reader, bias).to(torch.float32) if bias else None,
                tid2eid=self._table(reader),
            )

    def _in_form(
        self, reader: TensorReader, mlps: Sequence[StoredMlp], form: WeightFormat
    ) -> ExpertWeights:
        read = partial(read_matrix, reader, form=form, power_of_two_scales=self.power_of_two_scales)
        return ExpertWeights(
            w13=_joined([_gate_and_up(read, mlp) for mlp in mlps], dim=0),
            w2=_joined([read(mlp.w2) for mlp in mlps], dim=0),
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
        """The stored values, codes times their scale in float64."""
        return _ideal(self.stored.routed[expert_id], self._routed_form)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The stored values, codes times their scale in float64."""
        shared = self.stored.shared
        return _ideal(shared, self._shared_form) if shared else None

    @property
    def _routed_form(self) -> WeightFormat:
        return RECIPES[self.recipe].checkpoint

    @property
    def _shared_form(self) -> WeightFormat:
        return RECIPES[RECIPES[self.recipe].shared].checkpoint


def open_checkpoint(
    spec: WeightsSpec,
    model: MoeModel,
    recipe: QuantRecipe,
    *,
    hashed: bool = False,
    power_of_two_scales: bool = False,
) -> CheckpointWeights:
    """Find a layer in a checkpoint and check its names, shapes and dtypes; reads headers alone.

    Args:
        spec: of kind ``safetensors``; its path is a file, an index, or a directory.
        model: the sizes wanted.
        recipe: decides the form of the experts, and of the shared one.
        hashed: a layer that routes by token id.
        power_of_two_scales: as of ``CheckpointWeights``.

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
    return CheckpointWeights(
        path=spec.path,
        layer=spec.layer,
        recipe=recipe,
        stored=fitted,
        power_of_two_scales=power_of_two_scales,
    )


def _finite(reader: TensorReader, stored: StoredTensor) -> Tensor:
    values = reader.read(stored)
    check_values(stored, values)
    return values


def _gate_and_up(read: Callable[..., ExpertMatrix], mlp: StoredMlp) -> ExpertMatrix:
    parts = 2 // len(mlp.w13)
    return _joined([read(part, parts=parts) for part in mlp.w13], dim=1)


def _joined(matrices: Sequence[ExpertMatrix], *, dim: int) -> ExpertMatrix:
    """Experts end to end (dim 0), or rows of one expert (dim 1: blocks of rows must be whole)."""
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    return replace(
        matrices[0],
        values=torch.cat([matrix.values for matrix in matrices], dim),
        scale=torch.cat(scales, dim) if scales else None,
    )


def _ideal(mlp: StoredMlp, form: WeightFormat) -> tuple[Tensor, Tensor]:
    with TensorReader() as reader:
        w13 = torch.cat([exact_matrix(reader, part, form) for part in mlp.w13])
        return w13, exact_matrix(reader, mlp.w2, form)
