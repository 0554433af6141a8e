"""``run.py compare`` and ``compare: lattice`` as their users meet them: the documented output."""

import json
import re
import shlex
from itertools import pairwise

import pytest

import run
from reports.compare_result import CompareResult
from tests.unit.pages import ROOT, blocks

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "compare.md"
SMOKE = "scenarios/smoke/ep2_dp.yaml"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def quoted():
    """(arguments, output) of every command whose output the page shows behind it."""
    for command, output in pairwise(blocks(PAGE)):
        if (command.language, output.language) == ("sh", "text"):
            yield shlex.split(command.text)[2:], output.text.strip()


def without_numbers(text):
    """Which stage comes closest to its band is a number, too."""
    return NUMBER.sub("N", re.sub(r"closest: stage \w+", "closest: stage STAGE", text))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


QUOTED = [pytest.param(*one, id=shlex.join(one[0])) for one in quoted()]


def test_the_page_quotes_a_comparison_a_lattice_and_one_that_breaks():
    assert len(QUOTED) == 3


@pytest.mark.parametrize(("words", "output"), QUOTED)
def test_a_quoted_output_is_what_the_command_prints_up_to_numbers(words, output, tmp_path, capsys):
    run.main([*words, "--out", str(tmp_path)])
    assert without_numbers(capsys.readouterr().out.strip()) == without_numbers(output)


def kept(folder, *arguments):
    run.main(
        [SMOKE, "--runtime", "loopback", "--save-tensors", "all", "--out", str(folder), *arguments]
    )
    return str(folder)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return kept(tmp_path_factory.mktemp("right"))


def test_equal_results_exit_0_and_the_last_line_says_so(right, capsys):
    assert run.main(["compare", right, f"{right}/result.json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("same: ")


def test_a_wrong_result_exits_1_and_compare_json_says_why(right, tmp_path, capsys):
    wrong = kept(tmp_path / "wrong", "--inject", "topk_weights_twice")
    capsys.readouterr()
    assert run.main(["compare", right, wrong, "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verdict: ep2_dp (A) agree, ep2_dp (B) discrepancy"
    assert lines[-1].startswith("bug: ep2_dp (B): discrepancy: stage post_permute, rank 1")
    written = CompareResult.model_validate_json((tmp_path / "compare.json").read_bytes())
    assert (written.same, written.conclusion) == (False, lines[-1])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("scenarios/nothing.yaml", "no such file"),
        ("scenarios/compare", "cannot be read"),
        ("scenarios/compare/ep8.yaml", "model.moe_intermediate_size"),
        ("scenarios/sweeps/recipes.yaml", "is a sweep"),
    ],
)
def test_what_is_no_other_run_exits_2_with_the_reason(right, other, reason, capsys):
    assert run.main(["compare", right, other]) == 2
    said = capsys.readouterr()
    assert (said.out, reason in said.err) == ("", True)


def test_a_broken_edge_exits_1_and_the_result_has_the_lattice(tmp_path):
    words = [SMOKE, "--runtime", "loopback", "--set", "compare=lattice", "--out", str(tmp_path)]
    assert run.main([*words, "--inject", "first_chunk_for_all:rank=1"]) == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["verdict"] == "discrepancy"
    assert result["lattice"]["edges"][0]["likeness"] == "breaks"
