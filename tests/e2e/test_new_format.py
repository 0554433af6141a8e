"""The page about a new format is followed to the letter, in a copy of the tree."""

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


def without_numbers(line: str) -> str:
    """Which stage comes closest is a number too: it may be another one on another machine."""
    return NUMBER.sub("N", re.sub(r"stage \w+ on", "stage STAGE on", line))


def test_the_page_shows_it_agree_and_shows_faults_found():
    verdicts = [output.split(": ")[1] for _, output in followed(PAGE)]
    assert verdicts == ["agree", "discrepancy", "discrepancy"]


@pytest.mark.parametrize(
    ("words", "output"), [pytest.param(*pair, id=pair[0][-1]) for pair in followed(PAGE)]
)
def test_a_command_of_the_page_prints_what_the_page_shows(tree, words, output, tmp_path):
    done = subprocess.run(
        [sys.executable, "run.py", *words, "--quiet", "--out", tmp_path],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert without_numbers(done.stdout) == without_numbers(output), done.stderr
    assert done.returncode == int(": discrepancy: " in output)
