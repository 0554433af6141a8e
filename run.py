"""``python run.py PATH...``: run scenarios and sweeps, a verdict a line, leave JSON and pages."""

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from actors.console import print_table, stderr
from actors.exit_codes import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    OK,
    TERMINATED,
    WRONG_VERDICT,
    exit_code,
)
from actors.memory import keep_freed_memory
from actors.save_tensors import SaveTensors
from actors.signals import termination
from scenarios.errors import UserError

# Spinning OpenMP threads starve each other as soon as anything else runs on the machine (seen: a
# verdict of 0.3 s took 50 s). torch reads this when it is imported, which the commands below do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Proves that a multi-GPU MoE forward is the model it claims to be.",
    rich_markup_mode=None,
)


class Runtime(StrEnum):
    """Where the ranks live."""

    RAY = "ray"
    LOOPBACK = "loopback"


class Device(StrEnum):
    """What the ranks compute on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Paths = Annotated[list[str], typer.Argument(help="scenarios, sweeps, capsules, folders or globs")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a key; VALUE is YAML"),
]
Where = Annotated[Runtime | None, typer.Option(help="where the ranks live")]
Folder = Annotated[Path | None, typer.Option(help="default runs/<time>-<name>")]


@app.command()
def run(  # noqa: PLR0913, PLR0917  every parameter is an option of the command line
    paths: Paths,
    set_: Overrides = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT[:PARAM=VALUE,...]", help="inject a fault; see list --faults"),
    ] = None,
    runtime: Where = None,
    device: Annotated[Device | None, typer.Option(help="what the ranks compute on")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="until a silent rank counts as hung")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster; otherwise one is started here")
    ] = None,
    out: Folder = None,
    save_tensors: Annotated[
        SaveTensors, typer.Option(help="failed: of runs that do not agree")
    ] = SaveTensors.FAILED,
    save_traces: Annotated[
        bool, typer.Option("--save-traces", help="every stage of every rank, for judge")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="processes for what runs on loopback")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="only the rows of a sweep that --out lacks")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="run a sweep of over 100,000 rows")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="verdict lines only")] = False,
) -> int:
    """Run scenarios and judge them."""
    from actors.running import Manner, run_work, say_what_would_run
    from actors.session import Session
    from scenarios.sweep import MOST_ROWS

    sugar = {"run.runtime": runtime, "run.device": device, "run.timeout_s": timeout}
    overrides = [f"{key}={value}" for key, value in sugar.items() if value is not None]
    session = Session(
        overrides=(*(set_ or ()), *overrides),
        injects=tuple(inject or ()),
        address=address,
        save_tensors=save_tensors,
        save_traces=save_traces,
        most_rows=None if yes else MOST_ROWS,
    )
    work = session.load(paths)
    if dry_run:
        return say_what_would_run(work)
    return run_work(session, work, out, Manner(jobs=jobs, resume=resume, quiet=quiet))


@app.command("list")
def list_(
    paths: Annotated[list[str] | None, typer.Argument(help="default: scenarios")] = None,
    faults: Annotated[bool, typer.Option("--faults", help="what can be injected")] = False,
) -> int:
    """Print scenarios, presets, dispatchers, recipes; or the faults."""
    from scenarios.listing import catalog_tables, fault_tables

    last = "void where" if faults else "runs"
    for title, rows in fault_tables() if faults else catalog_tables(paths or ["scenarios"]):
        print_table(title, ("name", "about", last), rows)
    return OK


@app.command()
def score(
    paths: Paths,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="default runs/<time>-score")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
    faults: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="only this fault; may be given several times"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="the last line only")] = False,
) -> int:
    """Let every fault loose on every scenario; 1 if one survives, 0 if none does.

    A fault that changes no bit of what is traced is void and counts neither way. A scenario whose
    run without a fault does not agree is not scored, which is a 1 as well. Runs on loopback.
    """
    from actors.score import take_score
    from actors.session import Session
    from reports.score_tables import COLUMNS, fault_rows, scenario_rows, summary_line

    session = Session(overrides=tuple(set_ or ()))
    tell = (lambda line: None) if quiet else stderr.print
    taken, file = take_score(session.load(paths), out, jobs, tell, faults or ())
    for title, rows in (("faults", fault_rows(taken)), ("scenarios", scenario_rows(taken))):
        if not quiet:
            print_table(title, ("name", *COLUMNS, "where" if title == "faults" else "what"), rows)
    print(summary_line(taken))
    if not quiet:
        stderr.print(f"  {file}")
    return OK if taken.is_complete else WRONG_VERDICT


@app.command()
def judge(
    scenario: Annotated[str, typer.Argument(help="says what the engine should have computed")],
    trace: Annotated[Path, typer.Option(help="folder of safetensors, see docs/trace.md")],
    out: Folder = None,
    set_: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="the verdict line only")] = False,
) -> int:
    """Judge the traces of somebody else's engine; nothing is run."""
    from actors.running import print_verdict
    from actors.session import Session, prepare_folders
    from scenarios.loader import LoadedScenario

    session = Session(overrides=tuple(set_ or ()))
    loaded, *more = session.load([scenario])
    if more:
        raise UserError(f"{scenario}: {1 + len(more)} scenarios, a trace is of one")
    if not isinstance(loaded, LoadedScenario):
        raise UserError(f"{scenario}: a sweep is many scenarios, a trace is of one")
    (folder,) = prepare_folders([loaded], out)
    result = session.judge(loaded, trace, folder)
    print_verdict(result, loaded, folder, quiet=quiet)
    return exit_code([result])


@app.command()
def shrink(
    result: Annotated[Path, typer.Argument(help="a result.json, or its folder, that disagrees")],
    out: Annotated[Path | None, typer.Option(help="default runs/<time>-<name>-capsule")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="until the search ends")] = 60,
    candidates: Annotated[int, typer.Option(min=1, help="runs until the search ends")] = 500,
) -> int:
    """Search for the smallest scenario that still fails in the same way, and keep it as a capsule.

    Exit code as of a run of the capsule: 0 if it replays bit for bit.
    """
    from actors.shrink import Limits
    from actors.shrinking import shrink_result

    return exit_code([shrink_result(result, out, Limits(candidates=candidates, seconds=seconds))])


@app.command()
def doctor(
    paths: Annotated[
        list[str] | None, typer.Argument(help="scenarios to ask about; default: scenarios/gpu")
    ] = None,
) -> int:
    """Say what this machine can run: each backend is probed by a real call; 1 if one is broken."""
    from actors.doctor import Health, examine, machine_rows, scenario_rows
    from actors.probes import PROBES

    print_table("machine", ("name", "value"), [*machine_rows()])
    findings = examine([*PROBES])
    print_table("backends", ("name", "", "seen"), [(f.name, f.health, f.detail) for f in findings])
    print_table("scenarios", ("names", "here"), scenario_rows(paths or ["scenarios/gpu"], findings))
    return WRONG_VERDICT if any(one.health is Health.BROKEN for one in findings) else OK


@app.command()
def schema() -> int:
    """Print the JSON schema of a scenario, for editors."""
    from scenarios.schema import Scenario

    print(json.dumps(Scenario.model_json_schema(), indent=2))
    return OK


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="result.json files or their folders")],
) -> int:
    """Render pages again from JSON alone; a bad file keeps no other from its page."""
    from actors.pages import render_again

    render_again(results)
    return OK


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(help="a result.json, its folder, or a scenario")],
    other: Annotated[Path, typer.Argument(help="the same of another topology, or run")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a key of the scenarios"),
    ] = None,
    runtime: Where = None,
    out: Annotated[Path | None, typer.Option(help="folder for compare.json and the runs")] = None,
) -> int:
    """Compare two results or topologies: exit 1 if bits or verdicts differ."""
    from actors.compare import compare_runs, load_runs
    from actors.output import prepare_folder
    from reports.compare_result import compare_lines
    from reports.result_file import write_result

    if out is not None:
        prepare_folder(out)
    sugar = [] if runtime is None else [f"run.runtime={runtime}"]
    result = compare_runs(*load_runs([one, other], [*(set_ or ()), *sugar], out))
    for line in compare_lines(result):
        print(line)
    if out is not None:
        write_result(result, out / "compare.json")
    return OK if result.same else WRONG_VERDICT


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    keep_freed_memory()
    words = list(arguments)
    verbs = {command.name or "" for command in app.registered_commands} | {"--help"}
    if words and words[0] not in {
        *verbs,
        *(c.callback.__name__ for c in app.registered_commands if c.callback),
    }:
        words.insert(0, "run")
    try:
        with termination() as asked:
            code = app(words, standalone_mode=False)  # answers an interrupt with a code
    except UserError as error:
        stderr.print(str(error))
        return BAD_INPUT
    except typer.TyperException as error:  # typer brings a click of its own
        stderr.print(error.format_message())
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        stderr.print("terminated" if asked.is_asked else "interrupted")
        return TERMINATED if asked.is_asked else INTERRUPTED
    except Exception:  # noqa: BLE001  our own mistake must not look like a verdict
        stderr.print_exception()
        stderr.print("moe-assay itself failed; nothing was judged")
        return FAILED
    return TERMINATED if asked.is_asked else int(code or OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
