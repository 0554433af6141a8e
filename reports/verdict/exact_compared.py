"""Traced tensors beside the values that they can hold, in canonical coordinates."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.decode import codes_f64, scales_f64
from reports.verdict.deviation import NotAsked
from reports.verdict.exact_rows import Certain, CertainRows
from reports.verdict.rows import Rows
from reports.verdict.subject import Subject
from topology.sync import PADDING

EXACT = "exact"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Compared:
    """One traced tensor beside what it can hold.

    rows        coordinates of N rows
    got, want   [N, C] float64
    is_certain  [N, C] bool; other cells are the band's
    is_coded    codes or scales, each a number of its own: no step between them can vanish
    """

    stage: Stage
    tensor: str
    rows: Rows
    got: Tensor
    want: Tensor
    is_certain: Tensor
    is_coded: bool = False


def of_tokens(
    subject: Subject, stage: Stage, tensor: str, rows: Rows, want: Tensor, is_certain: Tensor
) -> Compared:
    """A tensor of layer rows, or of own rows in glue_out: [T, C] of the global token list."""
    real = rows.token != PADDING
    got = subject.tensor_of(subject.ranks, stage, tensor)[real].to(torch.float64)
    at = rows.token[real]
    return Compared(
        stage=stage,
        tensor=tensor,
        rows=rows[real],
        got=got,
        want=want[at],
        is_certain=is_certain[at],
    )


def of_rows(
    stage: Stage,
    tensor: str,
    rows: Rows,
    traced: tuple[Tensor, Tensor | None],
    want: CertainRows,
) -> Iterator[Compared | NotAsked]:
    """Codes and scales; one in another form than due is a broken contract, and left out here."""
    values, scale = traced
    is_coded = values.dtype == torch.float8_e4m3fn
    if is_coded != (want.scale is not None):
        due = "codes" if want.scale is not None else "bf16"
        why = f"{tensor} is {values.dtype} where {due} are due"
        yield NotAsked(check=EXACT, what=str(stage), why=why)
        return
    got = codes_f64(values) if is_coded else values.to(torch.float64)
    yield Compared(
        stage=stage,
        tensor=tensor,
        rows=rows,
        got=got,
        want=want.codes,
        is_certain=want.is_certain,
        is_coded=is_coded,
    )
    if scale is not None and want.scale is not None and want.keeps_scale:
        groups = want.scale.shape[1]
        yield Compared(
            stage=stage,
            tensor=f"{tensor}_scale",
            rows=rows,
            got=scales_f64(scale, groups),
            want=want.scale,
            is_certain=want.is_certain[:, :: want.is_certain.shape[1] // groups],
            is_coded=True,
        )


def by_shard(shards: tuple[Certain, ...], route: Tensor, shard: Tensor, name: str) -> Tensor:
    """[N, C] of each row's own shard."""
    if len(shards) == 1:
        whole: Tensor = getattr(shards[0], name)[route]
        return whole
    stacked = torch.stack([getattr(one, name) for one in shards])
    return stacked[shard, route]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Cuts columns into ``count`` equal parts and gives each row [N] that of its ``index``."""

    count: int
    index: Tensor

    def of(self, values: Tensor, halves: int = 1) -> Tensor:
        """[N, C / count] of [N, C], whose halves are cut each by itself."""
        if self.count == 1:
            return values
        cut = torch.unflatten(values, 1, (halves, self.count, -1))
        return cut[torch.arange(len(values)), :, self.index].flatten(1)

    def of_quantised(self, rows: CertainRows) -> CertainRows:
        """The same of codes and scales."""
        return replace(
            rows,
            codes=self.of(rows.codes),
            value=self.of(rows.value),
            is_certain=self.of(rows.is_certain),
            scale=None if rows.scale is None else self.of(rows.scale),
            slack=None if rows.slack is None else self.of(rows.slack),
        )
