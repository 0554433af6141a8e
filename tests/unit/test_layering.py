"""Who may import whom, and the few things that no file may do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "run": {"actors", "scenarios", "reports", "moe", "topology"},
    "actors": {"actors", "scenarios", "reports", "moe", "topology"},
    "scenarios": {"scenarios", "moe", "topology"},
    "reports": {"reports", "moe", "topology"},
    "moe": {"moe", "topology"},
    "topology": {"topology"},
}
SOURCES = sorted(
    [ROOT / "run.py", *(p for name in MAY_IMPORT for p in (ROOT / name).rglob("*.py"))]
)
EVERY_FILE = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda path: str(path.relative_to(ROOT))
)
GOLDEN = [path for path in SOURCES if path.is_relative_to(ROOT / "moe" / "golden")]
NAMES_THAT_SAY_NOTHING = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}


def imported(source: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    modules = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno} imports relatively"
            modules.add(str(node.module))
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def packages(source: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(source)}


def test_every_package_of_the_project_is_walked():
    walked = {path.relative_to(ROOT).parts[0] for path in SOURCES}
    assert walked == {"run.py", "actors", "moe", "reports", "scenarios", "topology"}


@EVERY_FILE
def test_imports_go_one_way(source):
    package = source.relative_to(ROOT).with_suffix("").parts[0]
    assert packages(source) & MAY_IMPORT.keys() <= MAY_IMPORT[package]


@EVERY_FILE
def test_ray_is_imported_in_one_file_alone(source):
    assert "ray" not in packages(source) or source == ROOT / "actors" / "cluster.py"


@EVERY_FILE
def test_no_product_file_imports_tests_or_benchmarks(source):
    assert not packages(source) & {"tests", "benchmarks"}


@pytest.mark.parametrize("source", GOLDEN, ids=lambda path: path.name)
def test_the_golden_model_shares_nothing_with_what_it_judges_but_formats(source):
    own = {module for module in imported(source) if module.split(".")[0] in MAY_IMPORT}
    assert all(f"{module}.".startswith(("moe.formats.", "moe.golden.")) for module in own)


VERDICT = [path for path in SOURCES if path.is_relative_to(ROOT / "reports" / "verdict")]
JUDGED_BY = ("moe.formats.", "moe.golden.", "moe.arithmetic.", "moe.batch.", "moe.trace.")
CHECKPOINT = {
    "moe.weights",
    "moe.weights.WeightSource",
    "moe.weights.ExpertMatrix",
    "moe.weights.ExpertWeights",
}
"""The protocol by which both sides read the same checkpoint, and its values."""


@pytest.mark.parametrize("source", VERDICT, ids=lambda path: path.name)
def test_the_verdict_judges_by_values_and_not_by_the_code_that_made_them(source):
    own = {module for module in imported(source) if module.startswith("moe")} - CHECKPOINT
    assert all(f"{module}.".startswith(JUDGED_BY) for module in own)


@pytest.mark.parametrize("module", ["scenarios.schema", "scenarios.loader"])
def test_reading_a_scenario_imports_no_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert finished.returncode == 0


@EVERY_FILE
def test_no_file_rebinds_module_state(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]


@EVERY_FILE
def test_a_file_is_named_by_what_is_in_it(source):
    assert source.name not in NAMES_THAT_SAY_NOTHING


@EVERY_FILE
def test_no_stage_asks_torch_distributed_who_it_is(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    outside_topology = source.relative_to(ROOT).parts[0] != "topology"
    assert not (outside_topology and any(node.attr == "get_rank" for node in asked))
