"""Exact mode under two topologies: cells that can hold one value only, in either, hold it in both.

A certified value is what the inputs and a topology's declared stores leave no choice about. Where
two topologies have the same one, sums in another order are no reason to differ, so nothing is.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.canonical import OUTPUT, CanonicalForward, Key
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.exact_rows import Certain, CertainRows
from reports.verdict.narrow import narrowest
from reports.verdict.topology_bits import Parting, parting_of

UNCERTAIN: Final = torch.nan

CertainValues = Mapping[Key, Tensor]
"""(stage, tensor) -> [T, C], or [T * K, C] of routes; NaN where not certified.

In the narrowest of bf16, fp32 and float64 that has all of them.
"""


def certain_values(stages: CertifiedLayer, sums: CertifiedSums) -> CertainValues:
    """What every topology's own arithmetic may not change of a forward.

    Args:
        stages: certified values up to the experts' outputs.
        sums: and behind them.
    """
    routes, top_k = stages.routes, stages.topk_ids.shape[1]
    values = {
        (Stage.GLUE_IN, "hidden_states"): _of(stages.tokens),
        (Stage.GEMM1, "gate_up"): _of(routes.gate_up),
        (Stage.GEMM2, "output"): _of(routes.outputs[0]),
        (Stage.COMBINE, "routed"): _of(sums.routed),
        (Stage.TAIL, "output"): _of(sums.output),
        OUTPUT: _of(sums.output),
    }
    grouped = _of_rows(stages.grouped)
    if grouped is not None:
        by_route = grouped.repeat_interleave(top_k, dim=0)
        values[Stage.PRE_PERMUTE, "rows.hidden_states"] = by_route
    middle = _of_rows(routes.middle)
    if middle is not None:
        values[Stage.ACTIVATION, "hidden_states"] = middle
    return values


def _of(cells: Certain) -> Tensor:
    return narrowest(cells.value.masked_fill(~cells.is_certain, UNCERTAIN))


def _of_rows(rows: CertainRows) -> Tensor | None:
    """Codes times the golden's scale; None where their scale's bits are not certain."""
    if not rows.keeps_scale:
        return None
    value = rows.codes.to(torch.float64)
    if rows.scale is not None:
        value = value * rows.scale.repeat_interleave(value.shape[1] // rows.scale.shape[1], dim=1)
    return narrowest(value.masked_fill(~rows.is_certain, UNCERTAIN))


def certified_parting(
    one: CanonicalForward,
    other: CanonicalForward,
    certain: tuple[CertainValues, CertainValues],
) -> Parting | None:
    """Where two forwards first differ in a cell with one certified value in both; None: nowhere.

    Args:
        one: what a topology computed.
        other: and another one, of the same tokens.
        certain: what each of them is certified to hold.
    """
    for key in one.values:
        if key in other.values and all(key in values for values in certain):
            is_alike = certain[0][key] == certain[1][key]  # NaN is like nothing
            mine, theirs = one.values[key], other.values[key]
            found = parting_of(key, mine, theirs, one.layer.top_k, is_alike)
            if found:
                return found
    return None


def certified_output(certain: tuple[CertainValues, CertainValues]) -> Tensor:
    """[T, H] bool: cells of the output that have one certified value in both."""
    mine, theirs = (values[OUTPUT] for values in certain)
    return mine == theirs
