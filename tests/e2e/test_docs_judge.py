"""The page about judging: its commands run, one after the other, and print what it shows."""

import re
from itertools import pairwise

import pytest

from tests.unit.pages import ROOT, blocks, table_rows
from tests.unit.test_docs import commands_of, without_numbers
from tests.unit.test_docs_trace import SMOKE

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "judge.md"


def steps():
    """(language, text, output shown behind it) of every block that does something."""
    found = blocks(PAGE)
    for block, output in pairwise(found):
        if block.language == "python":
            yield block.language, block.text, None
        elif block.language == "sh" and output.language == "text":
            yield block.language, block.text, output.text


def test_the_worked_example_prints_what_it_shows(called, tmp_path, monkeypatch):
    assert SMOKE.is_file()
    monkeypatch.chdir(ROOT)
    here = f"{tmp_path}/"
    shown = []
    for language, text, output in steps():
        text = text.replace("runs/", here)
        if language == "python":
            exec(text, {})
            continue
        (words,) = commands_of(text)
        _, printed, _ = called(*words, "--quiet")
        shown.append((without_numbers(printed.strip()), without_numbers(output.strip())))
    assert len(shown) == 3
    assert all(printed == written for printed, written in shown), shown


def test_tensors_of_the_table_are_those_of_the_page_about_traces():
    documented = {
        row[0] for row in table_rows((ROOT / "docs" / "trace.md").read_text()) if len(row) >= 4
    } | {"hidden_states_scale", "wire_scale"}
    rows = table_rows(PAGE.read_text().partition("## What to capture")[2])[1:]
    for cell, *_ in rows:
        for name in re.findall(r"[\w.]+(?:/[\w.]+)?", cell.replace("or ", "")):
            assert name.partition("/")[2] or name in documented, cell
            assert name.rpartition("/")[2] in documented, cell
