"""``python run.py PATH...``: run scenarios, print one verdict a line, leave JSON and a page."""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from actors.memory import keep_freed_memory
from scenarios.errors import UserError
from scenarios.paths import expand_paths

# Spinning OpenMP threads starve each other as soon as anything else runs on the machine (seen: a
# verdict of 0.3 s took 50 s). torch reads this when it is imported, which the commands below do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PIPED_WIDTH = 160
OK, WRONG_VERDICT, BAD_INPUT, FAILED, UNSUPPORTED = range(5)
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Proves that a multi-GPU MoE forward is the model it claims to be.",
    rich_markup_mode=None,
)
stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class Runtime(StrEnum):
    """Where the ranks live."""

    RAY = "ray"
    LOOPBACK = "loopback"


class Device(StrEnum):
    """What the ranks compute on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class SaveTensors(StrEnum):
    """For which results ``tensors.safetensors`` is written."""

    NONE = "none"
    FAILED = "failed"
    ALL = "all"


@app.command()
def run(  # noqa: PLR0913, PLR0917  every parameter is an option of the command line
    paths: Annotated[list[str], typer.Argument(help="scenario files, directories or globs")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a key; VALUE is YAML"),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT[:PARAM=VALUE,...]", help="inject a fault; see list --faults"),
    ] = None,
    runtime: Annotated[Runtime | None, typer.Option(help="where the ranks live")] = None,
    device: Annotated[Device | None, typer.Option(help="what the ranks compute on")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="until a silent rank counts as hung")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster; otherwise one is started here")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="default runs/<time>-<name>")] = None,
    save_tensors: Annotated[
        SaveTensors, typer.Option(help="failed: of runs that do not agree")
    ] = SaveTensors.FAILED,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="verdict lines only")] = False,
) -> int:
    """Run scenarios and judge them."""
    sugar = {"run.runtime": runtime, "run.device": device, "run.timeout_s": timeout}
    overrides = [f"{key}={value}" for key, value in sugar.items() if value is not None]
    scenarios = _load(paths, [*(set_ or ()), *overrides], inject or ())
    if dry_run:
        return _dry_run(scenarios)
    folders = _folders(scenarios, out)
    results = []
    with _one_ray_for(scenarios, address):
        for loaded, folder in zip(scenarios, folders, strict=True):
            if not quiet:
                stderr.print(f"{loaded.scenario.name}: {loaded.scenario.about or loaded.path}")
            command = _reproduce(loaded.path, [*(set_ or ()), *overrides], inject or ())
            results.append(_run_one(loaded, folder, address, command, save_tensors))
            if not quiet:
                stderr.print(f"  {folder / 'report.html'}")
    return _exit_code(results)


@app.command("list")
def list_(
    paths: Annotated[list[str] | None, typer.Argument(help="default: scenarios")] = None,
    faults: Annotated[bool, typer.Option("--faults", help="what can be injected")] = False,
) -> int:
    """Print scenarios, presets, dispatchers, recipes; or the faults."""
    console = Console(
        highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH
    )
    from scenarios.listing import catalog_tables, fault_tables

    for title, rows in fault_tables() if faults else catalog_tables(paths or ["scenarios"]):
        table = Table("name", "about", "runs", title=title, title_justify="left", box=None)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    return OK


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
    """Render pages again from JSON alone."""
    from reports.html.render import render
    from reports.result import ResultError, read_result

    for path in results:
        file = path / "result.json" if path.is_dir() else path
        try:
            page = render(read_result(file))
        except ResultError as error:
            raise UserError(str(error)) from error
        target = file.with_name("report.html")
        try:
            target.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{target}: {error.strerror}") from error
        print(target)
    return OK


def _load(paths: Sequence[str], overrides: Sequence[str], injects: Sequence[str]) -> list[Any]:
    """Every scenario that PATH names, or all that is wrong with any of them."""
    from actors.driver import check_input
    from moe.faults import FAULTS
    from scenarios.loader import load_scenario

    loaded, wrong = [], []
    for path in expand_paths(paths):
        try:
            one = load_scenario(path, overrides=overrides, injects=injects, known_faults=FAULTS)
            check_input(one)
            loaded.append(one)
        except UserError as error:
            wrong.append(str(error))
    names = Counter(one.scenario.name for one in loaded)
    wrong += [f"{count} scenarios are named {name!r}" for name, count in names.items() if count > 1]
    if wrong:
        raise UserError("\n".join(wrong))
    return loaded


def _dry_run(scenarios: Sequence[Any]) -> int:
    from actors.resolve import reasons_not_to_run

    for loaded in scenarios:
        scenario, reasons = loaded.scenario, reasons_not_to_run(loaded)
        size = f"{scenario.parallel.world_size} ranks, {sum(scenario.batch.tokens)} tokens"
        modes, runtime = ", ".join(scenario.inputs.modes), scenario.run.runtime
        verdict = f"unsupported: {'; '.join(reasons)}" if reasons else "would run"
        print(f"{scenario.name}: {verdict} ({size}, modes {modes}, {runtime})")
        for note in loaded.notes:
            print(f"  note: {note}")
    return OK


def _folders(scenarios: Sequence[Any], out: Path | None) -> list[Path]:
    """A writable folder for each scenario: OUT itself for one, OUT/<name> for several."""
    from actors.output import default_folder, prepare_folder

    if out is not None and not out.parts:
        raise UserError("--out names no folder")
    names = [loaded.scenario.name for loaded in scenarios]
    if len(names) == 1:
        folders = [out or default_folder(names[0])]
    else:
        parent = out or default_folder(f"{len(names)}-scenarios")
        folders = [parent / name for name in names]
    for folder in folders:
        prepare_folder(folder)
    return folders


def _one_ray_for(scenarios: Sequence[Any], address: str | None) -> AbstractContextManager[None]:
    """One Ray for several scenarios; a single one starts and ends its own."""
    if sum(loaded.scenario.run.runtime == "ray" for loaded in scenarios) < 2:
        return nullcontext()
    from actors.cluster import ray_session

    return ray_session(address)


def _run_one(
    loaded: Any,  # noqa: ANN401
    folder: Path,
    address: str | None,
    reproduce: str,
    save_tensors: SaveTensors,
) -> Any:  # noqa: ANN401
    from actors.driver import run_scenario
    from actors.output import write_outcome

    outcome = run_scenario(loaded, address=address, reproduce=reproduce)
    result = outcome.result
    keep = save_tensors is SaveTensors.ALL
    keep |= save_tensors is SaveTensors.FAILED and result.verdict != "agree"
    write_outcome(outcome, folder, with_tensors=keep)
    expect = loaded.scenario.expect
    wanted = f"{expect.verdict} in {expect.stage}" if expect.stage else expect.verdict
    expected = "" if result.as_expected else f" (expected: {wanted})"
    print(f"{result.name}: {result.summary}{expected}", flush=True)
    return result


def _interpreter() -> str:
    """The running Python, relative where it lies below the working directory."""
    running, here = Path(sys.executable), Path.cwd()
    return str(running.relative_to(here)) if running.is_relative_to(here) else "python"


def _reproduce(path: Path, overrides: Sequence[str], injects: Sequence[str]) -> str:
    words = [_interpreter(), "run.py", str(path)]
    for override in overrides:
        words += ["--set", override]
    for inject in injects:
        words += ["--inject", inject]
    return shlex.join(words)


def _exit_code(results: Sequence[Any]) -> int:
    """Of many results: a failure beats a wrong verdict, that beats 0, and 0 beats unsupported."""
    surprises = {str(result.verdict) for result in results if not result.as_expected}
    if "failed" in surprises:
        return FAILED
    if surprises & {"agree", "discrepancy"}:
        return WRONG_VERDICT
    if any(result.as_expected for result in results):
        return OK
    return UNSUPPORTED


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
        code = app(words, standalone_mode=False)
    except UserError as error:
        stderr.print(str(error))
        return BAD_INPUT
    except typer.TyperException as error:  # typer brings a click of its own
        stderr.print(error.format_message())
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        stderr.print("interrupted")
        return INTERRUPTED
    except Exception:  # noqa: BLE001  our own mistake must not look like a verdict
        stderr.print_exception()
        stderr.print("moe-assay itself failed; nothing was judged")
        return FAILED
    return int(code or OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
