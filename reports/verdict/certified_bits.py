"""Exact mode under two topologies: cells that can hold one value only, in either, hold it in both.

A certified value is what the inputs and a topology's declared stores leave no choice about. Where
two topologies have the same one, sums in another order are no reason to differ, so nothing is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.exact_rows import Certain, CertainRows
from reports.verdict.topology_bits import (
    OUTPUT,
    CanonicalForward,
    NamedRows,
    Parting,
    parting_of,
)

UNCERTAIN: Final = torch.nan

CertainValues = Mapping[tuple[Stage, str], Tensor]
"""(stage, tensor) -> [T, C], or [T * K, C] of routes, float64; NaN where not certified."""


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
    return cells.value.masked_fill(~cells.is_certain, UNCERTAIN)


def _of_rows(rows: CertainRows) -> Tensor | None:
    """Codes times the golden's scale; None where their scale's bits are not certain."""
    if not rows.keeps_scale:
        return None
    value = rows.codes
    if rows.scale is not None:
        value = value * rows.scale.repeat_interleave(value.shape[1] // rows.scale.shape[1], dim=1)
    return value.masked_fill(~rows.is_certain, UNCERTAIN)


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
    for (stage, tensor), mine, theirs in _shared(one, other, certain):
        found = parting_of(stage, tensor, mine, theirs, one.layer.top_k)
        if found:
            return found
    return None


def certified_output(certain: tuple[CertainValues, CertainValues]) -> Tensor:
    """[T, H] bool: cells of the output that have one certified value in both."""
    mine, theirs = (values[OUTPUT] for values in certain)
    return mine == theirs


def _shared(
    one: CanonicalForward,
    other: CanonicalForward,
    certain: tuple[CertainValues, CertainValues],
) -> Iterator[tuple[tuple[Stage, str], NamedRows, NamedRows]]:
    """Tensors of both, with what is not certified alike in both set to zero, stage by stage."""
    for key, mine in one.values.items():
        theirs = other.values.get(key)
        if theirs is None or any(key not in values for values in certain):
            continue
        is_alike = certain[0][key] == certain[1][key]  # NaN is like nothing
        whole = [
            replace(
                rows,
                values=rows.values.to(torch.float64).masked_fill(~is_alike[rows.names], 0.0),
            )
            for rows in (mine, theirs)
        ]
        yield key, whole[0], whole[1]
