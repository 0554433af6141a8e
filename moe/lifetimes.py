"""How long each stage's tensors are needed, and a tap that takes them away after that.

Real engines free or reuse such memory: the standard pre-permute frees the layer's input, a buffer
goes to the next layer. Whoever reads a tensor after its last declared use reads something else.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moe.formats import Stage
from moe.poison import poison
from moe.tap import Tap
from moe.trace import field_names, named_tensors

V = TypeVar("V")

LAST_USES: Final[Mapping[Stage, Mapping[str, Stage]]] = MappingProxyType(
    {
        Stage.GLUE_IN: {
            "hidden_states": Stage.TAIL,
            "own": Stage.GLUE_OUT,
            "input_ids": Stage.ROUTE,
        },
        Stage.ROUTE: {"topk_ids": Stage.DISPATCH, "topk_weights": Stage.DISPATCH},
        Stage.DISPATCH: {"handle": Stage.COMBINE, "": Stage.PRE_PERMUTE},
        Stage.PRE_PERMUTE: {
            "rows.hidden_states": Stage.GEMM1,
            "rows.hidden_states_scale": Stage.GEMM1,
            "rows": Stage.GEMM2,
            "restore": Stage.POST_PERMUTE,
        },
        Stage.GEMM1: {"": Stage.ACTIVATION},
        Stage.ACTIVATION: {
            "hidden_states": Stage.GEMM2,
            "hidden_states_scale": Stage.GEMM2,
        },
        Stage.GEMM2: {"": Stage.POST_PERMUTE},
        Stage.POST_PERMUTE: {"": Stage.COMBINE},
        Stage.COMBINE: {"": Stage.TAIL},
        Stage.TAIL: {"output": Stage.GLUE_OUT},
    }
)
"""Stage -> name of a tensor, or of what holds it, or "" for the rest -> stage that reads it last.

A tensor that none of the names covers is read by nobody.
"""


def last_use(stage: Stage, name: str) -> Stage:
    """The stage that reads a tensor last; its own stage if none does.

    Args:
        stage: whose output it is part of.
        name: as in the trace.
    """
    uses = LAST_USES.get(stage, {})
    holders = [name]
    while "." in holders[-1]:
        holders.append(holders[-1].rpartition(".")[0])
    return next((uses[holder] for holder in (*holders, "") if holder in uses), stage)


class ReleasingTap:
    """Hands on copies, and poisons each as soon as its last declared reader is through.

    Args:
        inner: the tap that sees the values themselves.
    """

    def __init__(self, inner: Tap) -> None:
        self._inner = inner
        self._lent: list[tuple[Stage, Tensor]] = []

    def __call__(self, stage: Stage, value: V) -> V:
        """A copy of what ``inner`` makes of ``value``, which may be part of an earlier copy."""
        lent: V = copied(self._inner(stage, copied(value)))
        self._lent += [(last_use(stage, name), tensor) for name, tensor in named_tensors(lent)]
        for last, tensor in self._lent:
            if last is stage:
                poison(tensor)
        self._lent = [(last, tensor) for last, tensor in self._lent if last is not stage]
        return lent


def copied(value: Any) -> Any:  # noqa: ANN401  whatever stages hand on
    """A stage value with tensors of its own, laid out in memory as they were."""
    if isinstance(value, Tensor):
        if value.is_contiguous():
            return value.clone()
        # ``clone`` would close up a layout that has gaps.
        size, stride = value.shape, value.stride()
        copy = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        return copy.copy_(value)
    if names := field_names(value):
        return replace(value, **{name: copied(getattr(value, name)) for name in names})
    return value
