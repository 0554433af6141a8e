"""The table of quantisation recipes: which numbers lie where, in groups of what. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    QuantRecipe,
    ScaleFormat,
)


class WeightFormat(StrEnum):
    """How a checkpoint holds an expert's matrices; forms in ``moe.weights.ExpertMatrix``."""

    BF16 = "bf16"
    FP8_BLOCK128 = "fp8_block128"
    FP8_PER_TENSOR = "fp8_per_tensor"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


class LoadPath(StrEnum):
    """What load-time preparation does to an expert's matrices, in words for a result."""

    KEEP = "kept as stored"
    REQUANTISE = "quantised again with power-of-two scales"
    MERGE = "one scale for gate and up, repeated for every block"
    PACK = "values kept, scales packed"
    QUANTISE = "quantised online, in groups of 32"
    FP4_TO_FP8 = "fp4 turned into fp8 blocks"
    FP4_TO_FP8_REQUANTISE = "fp4 turned into fp8 blocks, quantised again with power-of-two scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One row of the table.

    name              as scenarios name it
    checkpoint        what its checkpoints hold
    weight_block      rows and columns that a scale of the GEMM's B covers; None: no scale.
                      DeepGEMM's recipe_b where scales are packed: (1, columns)
    activation_group  columns that a scale of an activation covers, where pre-permute or the runner
                      quantises: DeepGEMM's recipe_a is (1, this); None: activations stay bf16
    shared            recipe of the shared expert
    about             one line
    """

    name: QuantRecipe
    checkpoint: WeightFormat
    weight_block: tuple[int, int] | None
    activation_group: int | None
    shared: QuantRecipe
    about: str

    @property
    def needs_ue8m0(self) -> bool:
        """Whether its GEMM reads power-of-two scales alone: those that cover 32 columns do."""
        return self.weight_block == (1, 32)

    @property
    def wire_group(self) -> int | None:
        """Columns of a scale where DeepEP's first two modes quantise: their kernels know 128."""
        return self.activation_group and 128

    def scale_format(self, activation_scales: ScaleFormat) -> ScaleFormat:
        """Of its scales on a platform whose activations have these."""
        return ScaleFormat.NONE if self.activation_group is None else activation_scales

    def input_group(self, dispatcher: DispatchFormat, *, bf16_wire: bool) -> int | None:
        """Columns of a scale in front of GEMM1: of the wire where dispatch quantises."""
        from_first_two_modes = (
            dispatcher is DispatchFormat.DEEPEP_NORMAL or dispatcher.is_low_latency
        )
        return self.wire_group if from_first_two_modes and not bf16_wire else self.activation_group

    def middle_group(self, activation: GatedActivation, layout: GemmLayout) -> int | None:
        """Columns of a scale between the GEMMs: situ's kernel of slabs knows 128 alone."""
        if self.activation_group is None:
            return None
        is_situ_in_slabs = activation.kind is ActivationKind.SITU and layout is GemmLayout.MASKED
        return 128 if is_situ_in_slabs else self.activation_group

    def load_path(self, scale_format: ScaleFormat, *, has_scales: bool = True) -> LoadPath:
        """What preparation does to a checkpoint of this recipe.

        Args:
            scale_format: what the platform's GEMM reads.
            has_scales: whether the matrices as they were read have scales; mxfp8's need not.
        """
        packs = scale_format is ScaleFormat.UE8M0
        match self.checkpoint:
            case WeightFormat.BF16:
                return LoadPath.KEEP
            case WeightFormat.FP8_BLOCK128:
                return LoadPath.REQUANTISE if packs else LoadPath.KEEP
            case WeightFormat.FP8_PER_TENSOR:
                return LoadPath.MERGE
            case WeightFormat.MXFP8:
                return LoadPath.PACK if has_scales else LoadPath.QUANTISE
            case WeightFormat.MXFP4 if self.name is QuantRecipe.MXFP4_W4A8:
                return LoadPath.PACK
            case WeightFormat.MXFP4:
                return LoadPath.FP4_TO_FP8_REQUANTISE if packs else LoadPath.FP4_TO_FP8


RECIPES: Final[Mapping[QuantRecipe, Recipe]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Recipe(
                name=QuantRecipe.BF16,
                checkpoint=WeightFormat.BF16,
                weight_block=None,
                activation_group=None,
                shared=QuantRecipe.BF16,
                about="nothing quantised",
            ),
            Recipe(
                name=QuantRecipe.FP8_BLOCK128,
                checkpoint=WeightFormat.FP8_BLOCK128,
                weight_block=(128, 128),
                activation_group=128,
                shared=QuantRecipe.FP8_BLOCK128,
                about="e4m3; weights in 128 x 128 blocks, activations in groups of 128",
            ),
            Recipe(
                name=QuantRecipe.FP8_PER_TENSOR,
                checkpoint=WeightFormat.FP8_PER_TENSOR,
                weight_block=(128, 128),
                activation_group=128,
                shared=QuantRecipe.FP8_PER_TENSOR,
                about="e4m3; one weight scale a matrix, repeated for every 128 x 128 block",
            ),
            Recipe(
                name=QuantRecipe.MXFP8,
                checkpoint=WeightFormat.MXFP8,
                weight_block=(1, 32),
                activation_group=32,
                shared=QuantRecipe.MXFP8,
                about="e4m3; groups of 32 with power-of-two scales, 128 on DeepEP's wire",
            ),
            Recipe(
                name=QuantRecipe.MXFP4_W4A8,
                checkpoint=WeightFormat.MXFP4,
                weight_block=(1, 32),
                activation_group=128,
                shared=QuantRecipe.FP8_BLOCK128,
                about="e2m1 weights in groups of 32, e4m3 activations in groups of 128",
            ),
            Recipe(
                name=QuantRecipe.MXFP4_AS_FP8,
                checkpoint=WeightFormat.MXFP4,
                weight_block=(128, 128),
                activation_group=128,
                shared=QuantRecipe.FP8_BLOCK128,
                about="e2m1 weights turned into fp8_block128 when they are loaded",
            ),
        )
    }
)
"""Recipe -> its row.

Source: SGLang 0.5.21, moe_runner/deep_gemm.py::DeepGemmMoeQuantInfo; quantization/fp8.py.
"""
