"""How checkpoints hold a matrix, by weight format: names of dtypes, shapes of values and scales."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from moe.indices import ceil_div
from moe.quant.mxfp import MX_GROUP_SIZE
from moe.recipes import RECIPES, WeightFormat
from scenarios.checkpoint_files import StoredTensor

BF16: Final = "BF16"
F32: Final = "F32"
E4M3: Final = "F8_E4M3"
E8M0: Final = "F8_E8M0"
I8: Final = "I8"
U8: Final = "U8"

BLOCK_SIZE: Final = 128
BLOCK: Final = (BLOCK_SIZE, BLOCK_SIZE)
GROUP: Final = (1, MX_GROUP_SIZE)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """One [N, K] matrix in a checkpoint.

    values       [N, K], or packed [N, K/2] or [N, K/32, 16]; with ``expert`` one more axis in front
    scale        as ``MatrixLayout`` has it, with that axis too; None beside bf16 values
    expert       position in a fused tensor; None: the tensor is the matrix
    interleaved  rows of gate and up take turns, gate first
    """

    values: StoredTensor
    scale: StoredTensor | None
    expert: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """What headers say of an [N, K] matrix in one weight format.

    values        dtypes; bf16 ones have no scale
    packed        values in a stored element
    scale         dtypes of the scale; () where none has one
    scale_shapes  (N, K) -> the shapes it may have
    block         rows and columns that a scale covers; None: the matrix, or there is no scale
    can_fuse      whether scaled experts are read from one tensor a projection
    quantises     whether bf16 values get the format as they are read
    """

    values: tuple[str, ...]
    packed: int = 1
    scale: tuple[str, ...] = ()
    scale_shapes: Callable[[int, int], tuple[Shape, ...]]
    block: tuple[int, int] | None = None
    can_fuse: bool = True
    quantises: bool = True

    def splits_a_group(self, columns: int) -> bool:
        """Whether a row ends inside a group; a block at the edge may be cut."""
        return self.block == GROUP and columns % MX_GROUP_SIZE != 0


def _none(_n: int, _k: int) -> tuple[Shape, ...]:
    return ()


def _blocks(n: int, k: int) -> tuple[Shape, ...]:
    return ((ceil_div(n, BLOCK_SIZE), ceil_div(k, BLOCK_SIZE)),)


def _one(_n: int, _k: int) -> tuple[Shape, ...]:
    return (), (1,)


def _groups(n: int, k: int) -> tuple[Shape, ...]:
    return ((n, ceil_div(k, MX_GROUP_SIZE)),)


LAYOUTS: Final[Mapping[WeightFormat, MatrixLayout]] = MappingProxyType(
    {
        WeightFormat.BF16: MatrixLayout(values=(BF16,), scale_shapes=_none),
        WeightFormat.FP8_BLOCK128: MatrixLayout(
            values=(E4M3, BF16), scale=(F32, BF16, E8M0), scale_shapes=_blocks, block=BLOCK
        ),
        WeightFormat.FP8_PER_TENSOR: MatrixLayout(
            values=(E4M3, BF16), scale=(F32, BF16), scale_shapes=_one, can_fuse=False
        ),
        WeightFormat.MXFP8: MatrixLayout(
            values=(E4M3, BF16),
            scale=(U8, E8M0),
            scale_shapes=_groups,
            block=GROUP,
            quantises=False,
        ),
        WeightFormat.MXFP4: MatrixLayout(
            values=(I8, U8), packed=2, scale=(U8, E8M0), scale_shapes=_groups, block=GROUP
        ),
    }
)
"""Weight format -> its layout.

Source: the published checkpoints of DeepSeek-V3, DeepSeek-V4-Flash and its base model,
MiniMax-M3-MXFP8 and Kimi-K3; SGLang 0.5.21, quantization/fp8.py::Fp8MoEMethod (one scale).
"""


def values_hint(stored: StoredTensor, layout: MatrixLayout, dtypes: tuple[str, ...]) -> str:
    """Which recipes read experts of that dtype where ``dtypes`` are wanted; "" if none does."""
    if stored.dtype in dtypes:
        return ""
    if stored.dtype in layout.values:
        return f"experts in {stored.dtype} with one scale a matrix are read from a tensor each"
    recipes = _recipes(lambda other: stored.dtype in other.values)
    return f"experts in {stored.dtype} are for moe.recipe {recipes}" if recipes else ""


def scale_hint(stored: StoredTensor, shape: tuple[int, int]) -> str:
    """Which recipes read such a scale of an [N, K] matrix; "" if none does."""
    recipes = _recipes(
        lambda other: stored.dtype in other.scale and stored.shape in other.scale_shapes(*shape)
    )
    return f"such a scale is for moe.recipe {recipes}" if recipes else ""


def _recipes(reads: Callable[[MatrixLayout], bool]) -> str:
    return " or ".join(name for name, row in RECIPES.items() if reads(LAYOUTS[row.checkpoint]))
