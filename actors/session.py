"""What one command asks for: its files loaded, a folder each, scenarios run and written."""

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from actors.by_mode import Keep
from actors.capsule import held_to_capsule, with_stored
from actors.driver import check_input, run_scenario
from actors.expected import wanted
from actors.judge_trace import judge_trace
from actors.lattice import with_lattice
from actors.output import default_folder, prepare_folder, write_outcome
from actors.save_tensors import SaveTensors
from moe.faults import FAULTS
from reports.result import Result, Verdict
from reports.sweep_result import RanRow
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.paths import expand_paths
from scenarios.sweep import MOST_ROWS, ExpandedSweep, load_path

Work = LoadedScenario | ExpandedSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What holds for everything that a command runs.

    overrides     as of ``--set``
    injects       as of ``--inject``
    address       a running Ray cluster; None starts one here
    save_tensors  for which results tensors are kept
    save_traces   keep every stage's tensors of every rank
    most_rows     of a product that is checked row by row; None is as many as there are
    """

    overrides: tuple[str, ...] = ()
    injects: tuple[str, ...] = ()
    address: str | None = None
    save_tensors: SaveTensors = SaveTensors.FAILED
    save_traces: bool = False
    most_rows: int | None = MOST_ROWS

    def load(self, paths: Sequence[str]) -> list[Work]:
        """Every scenario and sweep that the paths name.

        Raises:
            UserError: all that is wrong with any of them.
        """
        work, wrong = [], []
        for path in expand_paths(paths):
            try:
                one = load_path(
                    path,
                    overrides=self.overrides,
                    injects=self.injects,
                    known_faults=FAULTS,
                    most_rows=self.most_rows,
                )
                if isinstance(one, LoadedScenario):
                    one = with_stored(one)
                for loaded in scenarios_of(one):
                    check_input(loaded)
                work.append(one)
            except UserError as error:
                wrong.append(str(error))
        names = Counter(map(name_of, work))
        wrong += [f"{n} scenarios are named {name!r}" for name, n in names.items() if n > 1]
        if wrong:
            raise UserError("\n".join(wrong))
        return work

    def run(self, loaded: LoadedScenario, folder: Path, selects: Sequence[str] = ()) -> Result:
        """Run one scenario and leave its files in a folder.

        Args:
            loaded: the scenario.
            folder: exists.
            selects: what ``--set`` has to say for its file to be this scenario.

        Raises:
            UserError: input that does not fit, or files that cannot be written.
        """
        reproduce = self.reproduce(loaded.path, selects)
        outcome = run_scenario(
            loaded,
            address=self.address,
            reproduce=reproduce,
            keep=Keep(traces=self.save_traces),
        )
        outcome = with_lattice(loaded, outcome)
        outcome = replace(outcome, result=held_to_capsule(outcome.result, loaded))
        keep = self.save_tensors.keeps(agrees=outcome.result.verdict is Verdict.AGREE)
        write_outcome(outcome, folder, with_tensors=keep, with_traces=self.save_traces)
        return outcome.result

    def judge(self, loaded: LoadedScenario, trace: Path, folder: Path) -> Result:
        """Judge traces that lie in ``trace`` and leave the result's files in ``folder``.

        Raises:
            UserError: no traces of this scenario's layer, or files that cannot be written.
        """
        reproduce = self.reproduce(loaded.path, verb=("judge",), more=("--trace", str(trace)))
        outcome = judge_trace(loaded, trace, reproduce)
        write_outcome(outcome, folder, with_tensors=False)
        return outcome.result

    def reproduce(
        self,
        path: Path,
        selects: Sequence[str] = (),
        *,
        verb: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> str:
        """The command that does the same again: ``verb`` before the path, ``more`` behind it."""
        words = [_interpreter(), "run.py", *verb, str(path), *more]
        for override in dict.fromkeys([*self.overrides, *selects]):
            words += ["--set", override]
        for inject in self.injects:
            words += ["--inject", inject]
        return shlex.join(words)


def name_of(work: Work) -> str:
    """What the results are filed under."""
    return work.sweep.name if isinstance(work, ExpandedSweep) else work.scenario.name


def scenarios_of(work: Work) -> Iterator[LoadedScenario]:
    """The scenario itself, or each legal row of a sweep."""
    if isinstance(work, ExpandedSweep):
        yield from (loaded for _, loaded in work.legal)
    else:
        yield work


def is_on_loopback(loaded: LoadedScenario) -> bool:
    """Whether all its ranks run in the process that runs it."""
    return loaded.scenario.run.runtime == "loopback"


def prepare_folders(work: Sequence[Work], out: Path | None) -> list[Path]:
    """A writable folder for each: ``out`` itself for one, ``out``/NAME for several.

    Args:
        work: one or more, no two of the same name.
        out: None is ``runs/<time>-<name>``.

    Raises:
        UserError: a folder that cannot be written to.
    """
    if out is not None and not out.parts:
        raise UserError("--out names no folder")
    names = [name_of(one) for one in work]
    if len(names) == 1:
        folders = [out or default_folder(names[0])]
    else:
        parent = out or default_folder(f"{len(names)}-scenarios")
        folders = [parent / name for name in names]
    for folder in folders:
        prepare_folder(folder)
    return folders


def one_ray_for(work: Sequence[Work], address: str | None) -> AbstractContextManager[None]:
    """One Ray for several scenarios; a single one starts and ends its own."""
    scenarios = (loaded.scenario for one in work for loaded in scenarios_of(one))
    if sum(scenario.run.runtime == "ray" for scenario in scenarios) < 2:
        return nullcontext()
    from actors.cluster import ray_session  # loopback must not pay for it

    return ray_session(address)


def unless_expected(result: Result | RanRow, loaded: LoadedScenario) -> str:
    """What a verdict's line ends with if the scenario expects another one."""
    if loaded.stored is not None:  # the summary says what its capsule expects
        return ""
    return "" if result.as_expected else f" (expected: {wanted(loaded)})"


def _interpreter() -> str:
    """The running Python, relative where it lies below the working directory."""
    running, here = Path(sys.executable), Path.cwd()
    return str(running.relative_to(here)) if running.is_relative_to(here) else "python"
