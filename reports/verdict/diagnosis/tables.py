"""The rows among which a misplaced row of a stage is looked for."""

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.diagnosis.case import GROUPED_STAGES, Case, numbers
from reports.verdict.diagnosis.content import Table
from reports.verdict.rows import Rows
from topology.sync import PADDING


def tables_of(case: Case) -> list[Table]:
    """Where a wrong row may come from, nearest first: what is due elsewhere, then the source."""
    due = Table(values=case.evidence.want, rows=case.evidence.rows)
    return [due, *_sources(case)]


def _sources(case: Case) -> list[Table]:
    """Rows that the stage was fed with, of all ranks; or all rows of the tensor itself."""
    subject, width = case.subject, case.got.shape[1]
    found: list[Table | None] = []
    match case.stage:
        case Stage.GLUE_IN:
            found = [_tokens(case), _own_rows(case)]
        case Stage.DISPATCH if "wire" in subject.stage(Stage.DISPATCH, case.rank):
            name = "wire_scale" if case.is_scale else "wire"
            found = [_of_layer_rows(case, Stage.DISPATCH, name)]
        case Stage.DISPATCH if not case.is_scale:
            found = [_of_layer_rows(case, Stage.GLUE_IN, "hidden_states")]
        case Stage.GLUE_OUT:
            found = [_of_layer_rows(case, Stage.TAIL, "output")]
        case stage if stage in GROUPED_STAGES and case.traced is not None:
            found = [_grouped(case, case.traced)]
    fitting = [table for table in found if table is not None]
    return [table for table in fitting if case.is_scale or table.values.shape[1] == width]


def _tokens(case: Case) -> Table:
    """The global token list, which belongs to no rank."""
    tokens = case.subject.hidden_states
    rows = Rows.of_rank(-1, len(tokens), torch.arange(len(tokens)))
    return Table(values=tokens.to(torch.float64), rows=rows)


def _own_rows(case: Case) -> Table:
    """What ranks entered with, padding included."""
    subject = case.subject
    own = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "own")
    return Table(values=numbers(own), rows=subject.own_rows)


def _of_layer_rows(case: Case, stage: Stage, name: str) -> Table | None:
    """A tensor of all ranks' layer rows, where every rank has it."""
    subject = case.subject
    if any(name not in subject.stage(stage, rank) for rank in subject.ranks):
        return None
    return Table(values=numbers(subject.layer_tensor(stage, name)), rows=subject.layer_rows)


def _grouped(case: Case, traced: Tensor) -> Table | None:
    """The grouped rows of the rank that are not wrong themselves, padding included."""
    if case.places is None:
        return None
    placed, total = case.subject.placed[case.rank], len(traced)
    is_right = torch.ones(total, dtype=torch.bool)
    is_right[case.places] = False
    token, slot = torch.full((total,), PADDING), torch.full((total,), -1)
    token[placed.row], slot[placed.row] = placed.rows.token, placed.rows.slot
    return Table(
        values=numbers(traced)[is_right],
        rows=Rows(
            rank=torch.full((total,), case.rank),
            token=token,
            slot=slot,
            expert=torch.full((total,), -1),
        )[is_right],
    )
