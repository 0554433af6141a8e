"""What a GPU generation has: scales, tiles, layouts, kernels, memory. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from moe.formats import Platform, QuantRecipe, ScaleFormat
from moe.recipes import RECIPES

GIB: Final = 1 << 30

_KERNELS_OF: Final[Mapping[QuantRecipe, QuantRecipe]] = MappingProxyType(
    {
        QuantRecipe.FP8_PER_TENSOR: QuantRecipe.FP8_BLOCK128,
        QuantRecipe.MXFP4_AS_FP8: QuantRecipe.FP8_BLOCK128,
    }
)
"""Recipes that run on another one's kernels: one scale a tensor, repeated for each block; fp4
weights, turned into fp8 blocks at load time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFacts:
    """One GPU generation, as SGLang 0.5.21 and sgl-deep-gemm 0.2.0 treat it.

    name                     as scenarios name it
    activation_scales        of quantised activations. Source: SGLang, DEEPGEMM_SCALE_UE8M0
    low_latency_scales       of DeepEP's low-latency wire. Source: SGLang, DEEPGEMM_BLACKWELL
    tile_heights             rows to which the compact layout of standard and flashinfer may align
                             segments, ascending; other dispatchers keep the last. The library
                             steps down by 32 from 224 (sm100) or 128 (sm120); SGLang takes 128 for
                             what is over it, the library for 96 on sm120. Source: DeepGEMM,
                             get_contiguous_layout_alignment, as the released library answers
    has_slabs                standard and flashinfer may take the masked layout. Source: SGLang,
                             moe_runner/deep_gemm.py::pre_permute_standard_to_deep_gemm
    wide_segment_rows        rows from which on standard has a contiguous path of its own for codes,
                             where every expert is on the rank; None: it has none. Source: SGLang,
                             deep_gemm_sm120.maybe_pre_permute
    native_recipes           recipes with DeepGEMM kernels of their own. Source: SGLang,
                             deep_gemm_wrapper/configurer.py; sgl-deep-gemm, include/.../impls
    device                   the product whose memory is meant. Source: NVIDIA's data sheets
    device_bytes             its nominal memory, free on an emulated device
    """

    name: Platform
    activation_scales: ScaleFormat
    low_latency_scales: ScaleFormat
    tile_heights: tuple[int, ...]
    has_slabs: bool
    wide_segment_rows: int | None
    native_recipes: tuple[QuantRecipe, ...]
    device: str
    device_bytes: int

    def scale_format(self, recipe: QuantRecipe) -> ScaleFormat:
        """How a recipe's scales are stored here; NONE for bf16."""
        return RECIPES[recipe].scale_format(self.activation_scales)

    def segment_alignment(self, num_routes: int, num_local_experts: int) -> int:
        """The least tile height that holds an expert's mean number of rows, or the greatest.

        Args:
            num_routes: slots of all rows, those of other ranks and dropped ones included.
            num_local_experts: expert slots of a rank.
        """
        rows = -(-num_routes // num_local_experts)
        return next((tile for tile in self.tile_heights if tile >= rows), self.tile_heights[-1])

    def refusal(self, recipe: QuantRecipe) -> str | None:
        """Why DeepGEMM has no kernels for a recipe here, or None if it has."""
        if _KERNELS_OF.get(recipe, recipe) in self.native_recipes:
            return None
        native = ", ".join(self.native_recipes)
        return f"recipe {recipe} has no DeepGEMM kernels on {self.name} (native there: {native})"


PLATFORMS: Final[Mapping[Platform, PlatformFacts]] = MappingProxyType(
    {
        facts.name: facts
        for facts in (
            PlatformFacts(
                name=Platform.SM90,
                activation_scales=ScaleFormat.FP32,
                low_latency_scales=ScaleFormat.FP32,
                tile_heights=(128,),
                has_slabs=True,
                wide_segment_rows=None,
                native_recipes=(QuantRecipe.BF16, QuantRecipe.FP8_BLOCK128),
                device="H100 80 GB",
                device_bytes=80 * GIB,
            ),
            PlatformFacts(
                name=Platform.SM100,
                activation_scales=ScaleFormat.UE8M0,
                low_latency_scales=ScaleFormat.UE8M0,
                tile_heights=(32, 64, 96, 128),
                has_slabs=True,
                wide_segment_rows=None,
                native_recipes=(
                    QuantRecipe.BF16,
                    QuantRecipe.FP8_BLOCK128,
                    QuantRecipe.MXFP8,
                    QuantRecipe.MXFP4_W4A8,
                ),
                device="B200 180 GB",
                device_bytes=180 * GIB,
            ),
            PlatformFacts(
                name=Platform.SM120,
                activation_scales=ScaleFormat.UE8M0,
                low_latency_scales=ScaleFormat.FP32,  # the flag names datacentre Blackwell alone
                tile_heights=(32, 64, 128),
                has_slabs=False,
                wide_segment_rows=1024,
                native_recipes=(
                    QuantRecipe.BF16,
                    QuantRecipe.FP8_BLOCK128,
                    QuantRecipe.MXFP4_W4A8,
                ),
                device="RTX PRO 6000 Blackwell 96 GB",
                device_bytes=96 * GIB,
            ),
        )
    }
)
"""Platform -> its facts."""
