"""``silu(gate) * up`` of the rows that hold a route, clamped and quantised on the way."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.activation import ActivationStores, stores_of
from moe.formats import ActivationKind, GatedActivation, GemmLayout, ScaleFormat
from moe.indices import align, ceil_div
from moe.poison import poison
from moe.quant.fp8 import ACTIVATION_AMAX_FLOOR
from moe.quant.ue8m0 import BYTES_PER_WORD, mn_major
from moe.stages import ActivationOutput
from moe.triton_kernels.group_quant import group_codes
from moe.triton_kernels.launch import ROUNDS_EVERY_STEP, bits_of
from moe.triton_kernels.number_formats import bf16_to_fp32, exp_fp32, fp32_to_bf16

ROWS_PER_PROGRAM = 16
UNQUANTISED_COLUMNS = 128
"""Columns of one step where no group sets their number."""


@triton.jit
def _silu(gate):
    return tl.div_rn(gate, 1.0 + exp_fp32(-gate))


@triton.jit
def _clamped(gate, up, limit):
    """The hardware's min and max, which return the other operand of a NaN."""
    gate = tl.where(gate < limit, gate, limit)
    return gate, tl.where(up > -limit, tl.where(up < limit, up, limit), -limit)


@triton.jit
def _product(gate, up, mask, limit, CLAMPS: tl.constexpr, TWICE: tl.constexpr):
    """[R, C] fp32 of what the pointers name; TWICE rounds silu to bf16 in front of the product."""
    gate = bf16_to_fp32(tl.load(gate, mask=mask, other=0))
    up = bf16_to_fp32(tl.load(up, mask=mask, other=0))
    if CLAMPS:
        gate, up = _clamped(gate, up, limit)
    bent = _silu(gate)
    if TWICE:
        bent = bf16_to_fp32(fp32_to_bf16(bent))
    return bent * up


@triton.jit
def _stored(product, out, mask, KEEPS_FP32: tl.constexpr):
    """What the quantiser reads: the product, or that rounded to bf16."""
    if KEEPS_FP32:
        tl.store(out, product, mask=mask)
        return product
    else:  # noqa: RET505  a kernel returns at the end of each branch that it is compiled with
        bits = fp32_to_bf16(product)
        tl.store(out, bits, mask=mask)
        return bf16_to_fp32(bits)


@triton.jit
def _silu_and_mul_kernel(
    gate_up,
    places,
    activation,
    codes,
    scales,
    num_rows,
    columns,
    limit,
    floor,
    height,
    slab_stride,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IN_SLABS: tl.constexpr,
    CLAMPS: tl.constexpr,
    TWICE: tl.constexpr,
    KEEPS_FP32: tl.constexpr,
    QUANTISES: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """One block of rows by one stored scale: of one slab, or of the rows that ``places`` names.

    places  [N] int64 rows of ``gate_up``; in slabs [L] int32 rows that count in each
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slab = tl.program_id(2)
    if IN_SLABS:
        counted = tl.load(places + slab)
        if tl.program_id(0) * ROWS >= counted:
            return
        is_row = i < counted
        row = slab.to(tl.int64) * height + i
    else:
        is_row = i < num_rows
        row = tl.load(places + i, mask=is_row, other=0)
    PER_SCALE: tl.constexpr = 4 if UE8M0 else 1
    stored_column = tl.program_id(1)
    word = tl.zeros([ROWS], dtype=tl.int32)
    for part in tl.static_range(PER_SCALE):
        column = (stored_column * PER_SCALE + part) * BLOCK + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (column < columns)[None, :]
        gate = gate_up + row[:, None] * (2 * columns) + column[None, :]
        product = _product(gate, gate + columns, mask, limit, CLAMPS, TWICE)
        at = row[:, None] * columns + column[None, :]
        product = _stored(product, activation + at, mask, KEEPS_FP32)
        if QUANTISES:
            product_codes, stored = group_codes(product, floor, UE8M0, KEEPS_FP32)
            tl.store(codes + at, product_codes, mask=mask)
            if UE8M0:
                is_group = (stored_column * PER_SCALE + part) * BLOCK < columns
                word |= tl.where(is_group, stored << (8 * part), 0)
    if QUANTISES:
        place = (row // height) * slab_stride + (row % height) * row_stride
        place += stored_column * column_stride
        if UE8M0:
            stored = word
        tl.store(scales + place, stored, mask=is_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiluAndMul:
    """The gated activation of one set of experts, with the quantiser behind it.

    Rounded and stored as ``moe.runner`` does step by step. Its exp and torch's differ by an ulp or
    two of fp32, so the product is within one rounding of torch's; codes and scales are those of
    the product, bit by bit. Rows that hold no route stay poison.

    rule          a silu, clamped or not
    scale_format  of the quantiser; NONE: there is none
    group_size    columns that share a scale, a power of two

    Source: SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh; ep_moe/kernels.py;
    sgl-kernel silu_and_mul.
    """

    rule: GatedActivation
    scale_format: ScaleFormat
    group_size: int

    def __post_init__(self) -> None:
        if self.rule.kind is not ActivationKind.SILU:
            raise ValueError(f"this kernel computes silu, not {self.rule.kind}")

    def segments(self, gate_up: Tensor, live_rows: Tensor) -> ActivationOutput:
        """Of [M, 2I] bf16 the rows [N] int64 that hold a route."""
        stores = stores_of(self.rule, GemmLayout.CONTIG, self.scale_format)
        return self._launched(gate_up, live_rows, stores)

    def slabs(self, gate_up: Tensor, masked_m: Tensor) -> ActivationOutput:
        """Of [L, S, 2I] bf16 the first [L] int32 rows of each slab."""
        stores = stores_of(self.rule, GemmLayout.MASKED, self.scale_format)
        return self._launched(gate_up, masked_m, stores)

    def dense(self, gate_up: Tensor) -> ActivationOutput:
        """Of all rows [M, 2I] bf16; the product is stored once, whatever the layout."""
        every = torch.arange(gate_up.shape[0], device=gate_up.device)
        return self._launched(gate_up, every, ActivationStores.ONCE)

    def _launched(
        self, gate_up: Tensor, places: Tensor, stores: ActivationStores
    ) -> ActivationOutput:
        *rows, both = gate_up.shape
        columns = both // 2
        keeps_fp32 = stores is ActivationStores.NONE
        dtype = torch.float32 if keeps_fp32 else torch.bfloat16
        activation = poison(gate_up.new_empty((*rows, columns), dtype=dtype))
        quantises = self.scale_format is not ScaleFormat.NONE
        codes, scale = activation, activation
        if quantises:
            codes = poison(gate_up.new_empty((*rows, columns), dtype=torch.float8_e4m3fn))
            scale = self._room_for_scales(gate_up, columns)
        self._launch(gate_up, places, stores, activation, codes, scale)
        return ActivationOutput(
            activation=activation,
            hidden_states=codes,
            hidden_states_scale=scale if quantises else None,
        )

    def _launch(
        self,
        gate_up: Tensor,
        places: Tensor,
        stores: ActivationStores,
        activation: Tensor,
        codes: Tensor,
        scale: Tensor,
    ) -> None:
        """Fill the last three."""
        quantises = self.scale_format is not ScaleFormat.NONE
        in_slabs, columns = gate_up.dim() == 3, activation.shape[-1]
        slabs = scale if in_slabs else scale[None]
        height = gate_up.shape[-2]
        most = height if in_slabs else places.shape[0]
        block = self.group_size if quantises else UNQUANTISED_COLUMNS
        steps = slabs.shape[-1] if quantises else ceil_div(columns, block)
        if not (most and slabs.shape[0]):
            return
        grid = (ceil_div(most, ROWS_PER_PROGRAM), steps, slabs.shape[0])
        _silu_and_mul_kernel[grid](
            bits_of(gate_up.contiguous()),
            places.contiguous(),
            bits_of(activation),
            bits_of(codes),
            bits_of(scale),
            most,
            columns,
            self._limit(),
            ACTIVATION_AMAX_FLOOR,
            height,
            *slabs.stride(),
            BLOCK=block,
            ROWS=ROWS_PER_PROGRAM,
            IN_SLABS=in_slabs,
            CLAMPS=self.rule.limit is not None,
            TWICE=stores is ActivationStores.TWICE,
            KEEPS_FP32=stores is ActivationStores.NONE,
            QUANTISES=quantises,
            UE8M0=self.scale_format is ScaleFormat.UE8M0,
            **ROUNDS_EVERY_STEP,
        )

    def _limit(self) -> float:
        """As bf16 holds it."""
        if self.rule.limit is None:
            return 0.0
        return float(torch.tensor(self.rule.limit, dtype=torch.bfloat16, device="cpu"))

    def _room_for_scales(self, gate_up: Tensor, columns: int) -> Tensor:
        """As GEMMs read them, MN-major: poison, but words of segments are zero."""
        *rows, _ = gate_up.shape
        groups = columns // self.group_size
        if self.scale_format is ScaleFormat.FP32:
            return mn_major(poison(gate_up.new_empty((*rows, groups), dtype=torch.float32)))
        width = ceil_div(groups, BYTES_PER_WORD)
        if len(rows) == 1:
            return mn_major(gate_up.new_zeros((*rows, width), dtype=torch.int32))
        num_slabs, height = rows
        assert height == align(height, BYTES_PER_WORD), "slabs are whole words high"
        words = gate_up.new_empty((num_slabs, width, height), dtype=torch.int32)
        return poison(words).transpose(1, 2)
