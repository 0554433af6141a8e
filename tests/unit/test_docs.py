"""README and docs say what the code does: modules, links, commands, output, limits."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
import yaml

import run
from actors.result_rows import CHECKS
from scenarios.schema import Expectation, Scenario, Spec
from scenarios.support import running_values
from tests.unit.pages import PAGES, README, ROOT, blocks, section, table_rows

PACKAGES = ("actors", "moe", "reports", "scenarios", "topology")
SMOKE = ROOT / "scenarios" / "smoke" / "ep2_dp.yaml"
WALKTHROUGH = ROOT / "docs" / "new_format.md"
"""Its files and commands are those of a tree to which it is applied: ``tests/e2e`` does that."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
VERDICT_LINE = re.compile(r"^\w+: (?:agree|discrepancy|failed|unsupported): .*$", re.MULTILINE)


def words_after_run(command: str) -> list[str] | None:
    """Arguments of ``python run.py``, whichever python; None for another command."""
    words = shlex.split(command.removeprefix("$ "))
    if len(words) > 1 and Path(words[0]).name.startswith("python") and words[1] == "run.py":
        return words[2:]
    return None


def commands_of(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        for command in line.split(" && "):
            words = words_after_run(command)
            if words is not None:
                yield words


def documented_commands() -> list[list[str]]:
    found = []
    for page in PAGES:
        for block in blocks(page) if page != WALKTHROUGH else ():
            if block.language in ("sh", "console"):
                found += commands_of(block.text)
        for code in re.findall(r"`(python run\.py [^`]+)`", page.read_text()):
            found += commands_of(code)
    return found


def quoted_verdicts() -> list[tuple[list[str], str]]:
    """(arguments, verdict line) of every command whose output the README shows behind it."""
    readme = blocks(README)
    return [
        (words, line)
        for command, output in pairwise(readme)
        if (command.language, output.language) == ("sh", "text")
        for words in commands_of(command.text)
        for line in VERDICT_LINE.findall(output.text)
    ]


def modules() -> set[str]:
    """Every file of the packages that holds code."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {file.relative_to(ROOT).as_posix() for file in files if file.stat().st_size}


def test_architecture_describes_every_module_once():
    rows = table_rows((ROOT / "docs" / "architecture.md").read_text())
    described = [row[0] for row in rows if row[0].endswith(".py")]
    assert sorted(described) == sorted(modules())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page):
    text = page.read_text()
    made = re.findall(r"^New file `([^`]+)`:$", text, re.MULTILINE) if page == WALKTHROUGH else ()
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).is_file() and name not in made] == []


def slugs(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text())
    for name, anchor in links:
        target = (page.parent / name) if name else page
        assert target.exists(), name
        assert not anchor or anchor in slugs(target), f"{name}#{anchor}"


def test_readme_shows_commands_and_their_output():
    assert len(documented_commands()) >= 5
    assert [words[0] for words, _ in quoted_verdicts()] == ["scenarios/ep8_dp.yaml"] * 2


@pytest.mark.parametrize("words", documented_commands(), ids=shlex.join)
def test_a_documented_command_is_one_that_run_takes(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(run.app)
    if words[0] in group.commands:
        command = group.commands[words[0]]
        assert command.make_context(words[0], words[1:]).command is command
    else:
        assert run.main([*words, "--dry-run"]) == 0


@pytest.fixture
def one_thread():
    """The golden's many small products: two threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("words", "line"),
    [pytest.param(*quoted, id=shlex.join(quoted[0])) for quoted in quoted_verdicts()],
)
def test_a_quoted_verdict_is_what_a_run_prints_up_to_numbers(
    words, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    run.main([*words, "--runtime", "loopback", "--quiet", "--out", str(tmp_path)])
    assert without_numbers(capsys.readouterr().out.strip()) == without_numbers(line)


def without_numbers(line: str) -> str:
    """Which stage comes closest is a number too: it may be another one on another machine."""
    return NUMBER.sub("N", re.sub(r"stage \w+ on", "stage STAGE on", line))


def test_pip_is_told_of_files_and_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = re.findall(r"pip install -c (\S+) -e '?\.(?:\[(.*?)\])?'?", README.read_text())
    assert [constraints for constraints, _ in told] == ["constraints.txt"] * 2
    extras = {extra for _, names in told for extra in names.split(",") if extra}
    assert (ROOT / "constraints.txt").is_file()
    assert extras <= project["optional-dependencies"].keys()


def test_the_scenario_in_the_readme_is_the_shipped_one():
    (shown,) = (block for block in blocks(README) if block.language == "yaml")
    assert yaml.safe_load(shown.text) == yaml.safe_load(SMOKE.read_text())


def test_verdict_page_has_every_check():
    rows = table_rows(section("verdict.md", "## The checks"))[1:]
    assert [row[0] for row in rows] == [*CHECKS]


def leaf_keys(part: type[Spec], prefix: str = "") -> Iterator[str]:
    for name, field in part.model_fields.items():
        nested = field.annotation
        is_section = isinstance(nested, type) and issubclass(nested, Spec)
        if is_section and nested is not Expectation:
            yield from leaf_keys(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def values_that_run(key: str) -> str | None:
    try:
        values = running_values(key)
    except KeyError:
        return None
    return ", ".join("null" if value is None else str(value) for value in values)


def test_scope_page_has_every_limited_key_with_the_values_that_run():
    rows = table_rows(section("scope.md", "## What this version runs"))[1:]
    limited = {key: text for key in leaf_keys(Scenario) if (text := values_that_run(key))}
    assert dict(rows) == limited


def test_ci_calls_the_readmes_test_command():
    (command,) = [line for line in README.read_text().splitlines() if line.endswith("-m pytest")]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
