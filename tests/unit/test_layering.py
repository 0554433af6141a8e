"""Who may import whom, and the few things that no file may do."""

import ast
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
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
GOLDEN = [path for path in SOURCES if path.is_relative_to(ROOT / "moe" / "golden")]
NAMES_THAT_SAY_NOTHING = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}


def files(wrong: Callable[[Path], object], sources: Sequence[Path] = SOURCES) -> list[str]:
    """Those of the files that are wrong."""
    return [str(source.relative_to(ROOT)) for source in sources if wrong(source)]


@cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


@cache
def imported(source: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    modules = set()
    for node in ast.walk(tree_of(source)):
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


def test_imports_go_one_way():
    def strays(source):
        package = source.relative_to(ROOT).with_suffix("").parts[0]
        return packages(source) & MAY_IMPORT.keys() - MAY_IMPORT[package]

    assert files(strays) == []


def test_ray_is_imported_in_one_file_alone():
    assert files(lambda source: "ray" in packages(source)) == ["actors/cluster.py"]


def test_no_product_file_imports_tests_or_benchmarks():
    assert files(lambda source: packages(source) & {"tests", "benchmarks"}) == []


def own_modules(source: Path) -> set[str]:
    return {module for module in imported(source) if module.split(".")[0] in MAY_IMPORT}


def test_the_golden_model_shares_nothing_with_what_it_judges_but_formats():
    def shares(source):
        allowed = ("moe.formats.", "moe.golden.")
        return not all(f"{module}.".startswith(allowed) for module in own_modules(source))

    assert files(shares, GOLDEN) == []


VERDICT = [path for path in SOURCES if path.is_relative_to(ROOT / "reports" / "verdict")]
JUDGED_BY = (
    "moe.formats.",
    "moe.golden.",
    "moe.arithmetic.",
    "moe.batch.",
    "moe.trace.",
    "moe.mistakes.",
)
CHECKPOINT = {
    "moe.weights",
    "moe.weights.WeightSource",
    "moe.weights.ExpertMatrix",
    "moe.weights.ExpertWeights",
}
"""The protocol by which both sides read the same checkpoint, and its values."""


def test_the_verdict_judges_by_values_and_not_by_the_code_that_made_them():
    def shares(source):
        own = {module for module in imported(source) if module.startswith("moe")} - CHECKPOINT
        return not all(f"{module}.".startswith(JUDGED_BY) for module in own)

    assert files(shares, VERDICT) == []


@pytest.mark.parametrize("module", ["scenarios.schema", "scenarios.loader"])
def test_reading_a_scenario_imports_no_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert finished.returncode == 0


def test_no_file_rebinds_module_state():
    def rebinds(source):
        return any(isinstance(node, ast.Global) for node in ast.walk(tree_of(source)))

    assert files(rebinds) == []


def test_a_file_is_named_by_what_is_in_it():
    assert files(lambda source: source.name in NAMES_THAT_SAY_NOTHING) == []


def test_no_stage_asks_torch_distributed_who_it_is():
    def asks(source):
        asked = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)]
        outside_topology = source.relative_to(ROOT).parts[0] != "topology"
        return outside_topology and any(node.attr == "get_rank" for node in asked)

    assert files(asks) == []
