"""Traces cut down to what an engine may have captured, and judged without the forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.trace import RankTrace
from reports.verdict.captured_judge import CapturedJudge, tokens_of
from reports.verdict.judgement import Judgement
from tests.verdict.clean_runs import CleanRun

PINS_NOTHING = Batch(hidden_states=Tensor())
EXPERTS = (Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2)

SUBSETS: Mapping[str, Callable[[Stage, str], bool]] = {
    "dispatch to combine": lambda stage, name: (
        Stage.DISPATCH.position <= stage.position <= Stage.COMBINE.position
    ),
    "experts": lambda stage, name: stage in EXPERTS or name.startswith("rows."),
    "route": lambda stage, name: stage is Stage.ROUTE,
    "tail": lambda stage, name: stage in (Stage.TAIL, Stage.GLUE_OUT),
    "all but weights": lambda stage, name: stage is not Stage.WEIGHTS,
}
"""What is captured, by name."""


def kept(traces: Sequence[RankTrace], keeps: Callable[[Stage, str], bool]) -> list[RankTrace]:
    """The tensors that were captured."""
    return [
        replace(
            trace,
            stages={
                stage: {name: tensor for name, tensor in named.items() if keeps(stage, name)}
                for stage, named in trace.stages.items()
            },
        )
        for trace in traces
    ]


def replaced(
    traces: Sequence[RankTrace], rank: int, stage: Stage, name: str, tensor: Tensor | None
) -> list[RankTrace]:
    """The traces with one tensor of one rank exchanged, or gone."""
    named = {**traces[rank].stages[stage], name: tensor}
    stages = {**traces[rank].stages, stage: {n: t for n, t in named.items() if t is not None}}
    return [replace(t, stages=stages) if t.rank == rank else t for t in traces]


def judged_alone(
    run: CleanRun, traces: Sequence[RankTrace], judge: CapturedJudge | None = None
) -> Judgement:
    """The judgement of traces that nobody knows more of than what they hold."""
    layer = run.resolved.judged
    chosen = judge or CapturedJudge(layer)
    return chosen.judge_captured(tokens_of(layer, traces, PINS_NOTHING), traces)


def judged_stages(judgement: Judgement) -> set[Stage]:
    """Stages where something was compared."""
    return {stage for stage, _ in judgement.ledger.worst}
