"""The page about a new format is followed to the letter, in a copy of the tree."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.walkthrough import changes, followed

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_format.md").read_text()
COPIED = ("actors", "docs", "moe", "reports", "scenarios", "topology")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with every block of the page applied."""
    root = tmp_path_factory.mktemp("tree")
    for package in COPIED:
        shutil.copytree(
            ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "run.py", root)
    for change in changes(PAGE):
        change.apply(root)
    return root


def exits(text: str) -> list[str]:
    """The exit codes among what was printed."""
    return [line for line in text.splitlines() if line.startswith("exit ")]


def without_numbers(line: str) -> str:
    """Which stage comes closest is a number too: it may be another one on another machine."""
    return NUMBER.sub("N", re.sub(r"stage \w+ on", "stage STAGE on", line))


def test_the_page_shows_it_agree_and_shows_faults_found():
    verdicts = [output.split(": ")[1] for _, output in followed(PAGE)]
    assert verdicts == ["agree", "discrepancy", "discrepancy"]


COMMANDS = """\
import json, sys
import run
for words in json.loads(sys.argv[1]):
    print("exit", run.main([*words, "--quiet"]))
"""
"""Importing torch takes longer than a command, so they share a process."""


def test_the_commands_of_the_page_print_what_the_page_shows(tree, tmp_path):
    given = [[*words, "--out", str(tmp_path)] for words, _ in followed(PAGE)]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(given)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    due = "".join(
        f"{output.strip()}\nexit {int(': discrepancy: ' in output)}\n"
        for _, output in followed(PAGE)
    )
    assert exits(done.stdout) == exits(due), done.stderr
    assert without_numbers(done.stdout) == without_numbers(due), done.stderr
