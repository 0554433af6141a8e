"""What a run leaves on disk: result.json, report.html, tensors.safetensors and traces."""

import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from actors.driver import Outcome
from actors.result_rows import ModeRun
from moe.trace import save_traces
from reports.html.render import render
from reports.result_file import write_result
from scenarios.errors import UserError

FILES = ("tensors.safetensors", "report.html", "result.json")
TRACES = "traces"


class OutputError(UserError):
    """The output folder cannot be used."""


def default_folder(name: str) -> Path:
    """``runs/<time>-<name>``."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and make sure that it can be written to.

    Raises:
        OutputError: it cannot; the message says why.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"--out {folder}: {error.strerror}") from error


def write_outcome(
    outcome: Outcome, folder: Path, *, with_tensors: bool, with_traces: bool = False
) -> None:
    """Write everything of one run.

    Args:
        outcome: the result and the forwards behind it.
        folder: exists.
        with_tensors: also write ``tensors.safetensors`` where every rank came back.
        with_traces: also write every stage's tensors of every rank, in ``traces/<mode>`` of the
            first round and ``traces/<mode>_<round>`` of the others.

    Raises:
        OutputError: a file could not be written.
    """
    tensors, page, result = (folder / name for name in FILES)
    try:
        for stale in (tensors, page, result):  # an earlier run's are not of this result
            stale.unlink(missing_ok=True)
        for stale in (folder / TRACES).glob("*/rank_*.safetensors"):
            stale.unlink()
        for run in outcome.runs if with_traces else ():
            name = run.mode if run.round == 0 else f"{run.mode}_{run.round + 1}"
            save_traces([report.trace for report in run.reports], folder / TRACES / name)
        if with_tensors and outcome.runs:
            save_file(named_tensors(outcome.runs), tensors)
        page.write_text(render(outcome.result), encoding="utf-8")
        write_result(outcome.result, result)
    except OSError as error:
        raise OutputError(f"--out {folder}: {error}") from error


def named_tensors(runs: Sequence[ModeRun]) -> dict[str, Tensor]:
    """Inputs, routes, goldens and outputs of every mode's first round, in global token order."""
    tensors: dict[str, Tensor] = {}
    for run in (run for run in runs if run.round == 0):
        judgement = run.judgement
        tensors |= {
            f"{run.mode}/input/hidden_states": run.batch.hidden_states,
            f"{run.mode}/route/topk_ids": judgement.topk_ids,
            f"{run.mode}/route/topk_weights": judgement.topk_weights,
            f"{run.mode}/golden/ideal": judgement.ideal.output,
            f"{run.mode}/golden/same_recipe": judgement.same_recipe.output,
            f"{run.mode}/actual/output": judgement.output,
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
