"""Takes a layer's tensors by name and checks their headers; every problem is kept."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from moe.indices import ceil_div
from moe.quant.mxfp import MX_GROUP_SIZE
from scenarios.checkpoint_files import StoredTensor, TensorProblem
from scenarios.checkpoint_forms import (
    BF16,
    U8,
    MatrixLayout,
    Shape,
    StoredMatrix,
    scale_hint,
    values_hint,
)
from scenarios.checkpoint_names import LayerNames, all_spellings

_CONVERT: Final = "nothing is cast at load, convert the checkpoint first"
_CAST_DTYPES: Final = ("F32", "F16")

Hint = Callable[[StoredTensor], str]


def _no_hint(_: StoredTensor) -> str:
    return ""


class LayerFit:
    """Takes tensors by name; a wrong one becomes a problem and a stand-in, so all are found."""

    def __init__(self, layer: LayerNames, stored: Mapping[str, StoredTensor]) -> None:
        self._prefix = layer.prefix
        self._left = dict(layer.names)
        self._stored = stored
        self.problems: list[TensorProblem] = []

    def tensor(
        self,
        name: str,
        shapes: tuple[Shape, ...],
        dtypes: tuple[str, ...],
        hint: Hint = _no_hint,
    ) -> StoredTensor:
        """The tensor, of one of these shapes and dtypes.

        Args:
            name: in the ``gate_proj`` family.
            shapes: those that fit.
            dtypes: those that fit.
            hint: what to do about another one; "" for nothing.
        """
        wanted = _form(shapes, dtypes)
        if name not in self._left:
            spelled = f"{self._prefix}.{all_spellings(name)}"
            self.problems.append(TensorProblem("", spelled, f"missing; wanted {wanted}"))
        stored = self._stored.get(self._left.pop(name, ""))
        if stored is None:
            return StoredTensor(file="", name=name, shape=shapes[0], dtype="")
        if stored.shape not in shapes or stored.dtype not in dtypes:
            read = _form((stored.shape,), (stored.dtype,))
            hints = [told for told in (_cast(stored, dtypes), hint(stored)) if told]
            self.report(stored, "; ".join([f"{read} was read", f"wanted {wanted}", *hints]))
        return stored

    def matrix(
        self, name: str, shape: tuple[int, int], layout: MatrixLayout, *experts: int
    ) -> StoredMatrix:
        """The [N, K] matrix or, with a number of experts, the fused tensor of that many."""
        n, k = shape
        dtypes = layout.values if layout.can_fuse or not experts else (BF16,)
        values = self.tensor(
            name,
            ((*experts, n, k // layout.packed),),
            dtypes,
            partial(values_hint, layout=layout, dtypes=dtypes),
        )
        self._refuse_split_groups(values, k, layout)
        if values.dtype not in dtypes or values.dtype == BF16:
            self._refuse_scale(f"{name}_scale_inv", values)
            return StoredMatrix(values=values, scale=None)
        scale = self.tensor(
            f"{name}_scale_inv",
            tuple((*experts, *sizes) for sizes in layout.scale_shapes(n, k)),
            layout.scale,
            partial(scale_hint, shape=shape),
        )
        return StoredMatrix(values=values, scale=scale)

    def _refuse_scale(self, name: str, values: StoredTensor) -> None:
        """A scale that nothing wants; not worth a word if its weight is not as wanted."""
        scale = self._stored.get(self._left.pop(name, ""))
        if scale is not None and values.dtype == BF16:
            self.report(scale, f"a scale, but its weight is {BF16}; wanted one or the other")

    def _refuse_split_groups(self, values: StoredTensor, k: int, layout: MatrixLayout) -> None:
        """Columns that are left over have no scale; not worth a word if the dtype is wrong."""
        if layout.splits_a_group(k) and values.dtype in layout.values:
            self.report(values, f"{k} columns do not split into groups of {MX_GROUP_SIZE}")

    def fused(
        self, name: str, shape: tuple[int, int], layout: MatrixLayout, num_experts: int
    ) -> list[StoredMatrix]:
        """The matrices of all experts in one tensor."""
        every = self.matrix(name, shape, layout, num_experts)
        return [
            StoredMatrix(values=every.values, scale=every.scale, expert=expert)
            for expert in range(num_experts)
        ]

    def blocked(
        self,
        name: str,
        shape: tuple[int, int],
        layout: MatrixLayout,
        num_experts: int,
        *,
        interleaved: bool,
    ) -> list[StoredMatrix]:
        """The fp4 matrices of all experts, the 16 bytes of a group in an axis of their own.

        Source: the published checkpoints of gpt-oss.
        """
        groups = (num_experts, shape[0], ceil_div(shape[1], MX_GROUP_SIZE))
        values = self.tensor(name, ((*groups, MX_GROUP_SIZE // 2),), (U8,))
        scale = self.tensor(f"{name.removesuffix('_blocks')}_scales", (groups,), (U8,))
        if values.dtype == U8 and U8 not in layout.values:
            self.report(values, values_hint(values, layout, layout.values))
        self._refuse_split_groups(values, shape[1], layout)
        return [
            StoredMatrix(values=values, scale=scale, expert=expert, interleaved=interleaved)
            for expert in range(num_experts)
        ]

    def unread(self, why: Callable[[str], str]) -> list[TensorProblem]:
        """A problem for each tensor of the layer that nothing took."""
        return [
            TensorProblem(self._file(full), full, why(name)) for name, full in self._left.items()
        ]

    def _file(self, full: str) -> str:
        stored = self._stored.get(full)
        return stored.file if stored else ""

    def report(self, stored: StoredTensor, message: str) -> None:
        """One more problem."""
        self.problems.append(TensorProblem(stored.file, stored.name, message))


def _form(shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> str:
    return f"{' or '.join(str(list(shape)) for shape in shapes)} {' or '.join(dtypes)}"


def _cast(stored: StoredTensor, dtypes: tuple[str, ...]) -> str:
    return _CONVERT if stored.dtype in _CAST_DTYPES and stored.dtype not in dtypes else ""
