"""Judges traces that somebody else's engine left; no rank of ours runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from actors.driver import Outcome, Stopwatch
from actors.gemm import is_imported
from actors.machine import Choice
from actors.planning import judged_layer, plan_of
from actors.rank_program import RankReport
from actors.resolve import ResolvedLayer, ResolvedScenario
from actors.result_rows import ModeRun
from actors.results import RunFacts, judged_result, unsupported_result
from actors.world import RankStatus
from moe.arithmetic import DEEP_GEMM_SM90, TENSOR_CORES, AccumulatorWidths
from moe.batch import Batch
from moe.formats import ScaleFormat
from moe.trace import RankTrace, TraceFilesError, load_traces
from reports.result import Mode
from reports.verdict.captured_judge import CapturedJudge, tokens_of
from reports.verdict.layer import JudgedLayer
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.scale_layouts import in_due_layout
from reports.verdict.trace_check import trace_problems
from scenarios.batches import batch_of
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.schema import BackendsSpec, RunSpec
from scenarios.support import unsupported_reasons

JUDGED_TRACE: Final = "judged trace"
"""The runtime of a result for which no rank ran."""


class TraceError(UserError):
    """A trace that cannot be judged; every problem found.

    Args:
        folder: where it lies.
        problems: a sentence each.
    """

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        super().__init__(folder, tuple(problems))
        self.folder = folder
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{self.folder}: {len(self.problems)} problem(s)"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def judge_trace(loaded: LoadedScenario, folder: Path, reproduce: str = "") -> Outcome:
    """Hold the traces in a folder against the golden of a scenario's layer.

    Weights are the scenario's; tokens are the trace's own, or those of the scenario's input file.

    Args:
        loaded: says what the engine should have computed; ``run`` and ``inject`` have no meaning.
        folder: safetensors files with tensors named ``<stage>/<rank>/<name>``.
        reproduce: the command that judges the same again.

    Raises:
        UserError: several input modes, or files and tensors that are no trace of this layer.
    """
    scenario = loaded.scenario
    if len(scenario.inputs.modes) != 1:
        modes = ", ".join(scenario.inputs.modes)
        problem = (
            f"a trace is of one forward, inputs.modes is [{modes}]: "
            "name one, as in --set 'inputs.modes=[random]'"
        )
        raise TraceError(folder, [problem])
    gemm = BackendsSpec(gemm=scenario.run.backends.gemm)  # decides how wide bands are
    anywhere = scenario.model_copy(update={"run": RunSpec(backends=gemm)})
    reasons = unsupported_reasons(anywhere, loaded.model)
    if reasons:
        facts = RunFacts(loaded=loaded, resolved=None, seconds={}, reproduce=reproduce)
        return Outcome(result=unsupported_result(facts, reasons))
    watch, mode = Stopwatch(), scenario.inputs.modes[0]
    with watch.timing("resolve"):
        resolved = _resolved(loaded, folder, mode)
    with watch.timing("load"):
        traces = _loaded(resolved.judged, folder)
    with watch.timing("golden and verdict"):
        run, unread = _judged(loaded, resolved.judged, traces, folder)
    facts = RunFacts(
        loaded=loaded,
        resolved=resolved,
        seconds=watch.seconds,
        reproduce=reproduce,
        notes=_notes(loaded, run, traces, unread),
    )
    return Outcome(result=judged_result(facts, [run], _ranks(traces)), runs=(run,))


def _resolved(loaded: LoadedScenario, folder: Path, mode: str) -> ResolvedScenario:
    """The scenario's layer, computed by whoever wrote the trace."""
    plan = plan_of(loaded, mode)
    judged, gemm = judged_layer(plan, loaded), loaded.scenario.run.backends.gemm
    has_scales = plan.scale_format is ScaleFormat.FP32
    if gemm == "deep_gemm" and has_scales:
        arithmetic, kept = DEEP_GEMM_SM90, "14 bits inside 128 columns"
    elif is_imported(gemm):
        arithmetic, kept = judged.arithmetic, f"what {gemm} declares"
    else:
        arithmetic = replace(TENSOR_CORES, scaled_block=128 if has_scales else None)
        kept = "sums in any order that keep 24 bits and cut off the rest"
    judged = replace(judged, arithmetic=arithmetic)
    reason = f"whatever wrote {folder}; bands are those of {kept}"
    if judged.widths is not None:  # ours were measured, theirs cannot be
        judged = replace(judged, widths=AccumulatorWidths.declared_by(judged.arithmetic))
    name = "somebody else's" if gemm in ("auto", "torch") else gemm
    return ResolvedScenario(
        layers={mode: ResolvedLayer(plan=plan, judged=judged)},
        faults=(),
        backends={
            "runtime": Choice(name=JUDGED_TRACE, version="unknown", reason="no rank ran here"),
            "gemm": Choice(name=name, version="unknown", reason=reason),
        },
    )


def _loaded(layer: JudgedLayer, folder: Path) -> list[RankTrace]:
    """The traces of all ranks, which are of this layer.

    Raises:
        TraceError: they are not.
    """
    try:
        traces = load_traces(folder)
    except TraceFilesError as error:
        raise TraceError(folder, error.problems) from error
    problems = trace_problems(layer, traces)
    if problems:
        raise TraceError(folder, problems)
    return [trace if trace.has_strides else in_due_layout(layer, trace) for trace in traces]


def _judged(
    loaded: LoadedScenario, layer: JudgedLayer, traces: Sequence[RankTrace], folder: Path
) -> tuple[ModeRun, Sequence[str]]:
    """The judged forward, and the tensors that no check has read."""
    mode = loaded.scenario.inputs.modes[0]
    drawn = batch_of(loaded, mode)
    batch: Batch = drawn if mode == "file" else tokens_of(layer, traces, drawn)
    try:
        judge = CapturedJudge(layer)
        judgement = judge.judge_captured(batch, traces)
    except UnreadableTraceError as error:
        raise TraceError(folder, [str(error)]) from error
    ledger = judgement.ledger
    if not ledger.worst and any(layer.tokens):
        left_out = dict.fromkeys(f"{part.what}: {part.why}" for part in ledger.not_asked)
        raise TraceError(folder, ["no stage can be judged", *left_out])
    reports = [
        RankReport(trace=trace, calls=(), acted=frozenset(), seconds=0.0) for trace in traces
    ]
    run = ModeRun(
        mode=Mode(mode),
        batch=batch,
        reports=reports,
        judgement=judgement,
        diagnoses=judge.diagnose(batch, traces, ledger),
    )
    return run, judge.unread


def _ranks(traces: Sequence[RankTrace]) -> list[RankStatus]:
    return [
        RankStatus(rank=trace.rank, node="elsewhere", pid=None, device="unknown", state="ok")
        for trace in traces
    ]


def _notes(
    loaded: LoadedScenario, run: ModeRun, traces: Sequence[RankTrace], unread: Sequence[str]
) -> list[str]:
    """What was judged, and what was not asked for."""
    notes = ["judged from a trace: no rank ran here, collectives are not part of it"]
    if loaded.scenario.inject:
        notes.append(f"inject {list(loaded.scenario.inject)} was not applied: no forward ran")
    if not all(trace.has_strides for trace in traces):
        notes.append("the files say nothing of strides: scales were read as if laid out as due")
    parts = dict.fromkeys(f"{part.what}: {part.why}" for part in run.judgement.ledger.not_asked)
    nobody = [f"{name}: no check reads it" for name in unread]
    return [*notes, *(f"not judged: {part}" for part in (*parts, *nobody))]
