"""The page about checkpoints: its example runs, and its tables are those of the loader."""

import re

import pytest

import run
from moe.recipes import WeightFormat
from scenarios.checkpoint_forms import LAYOUTS
from scenarios.checkpoint_names import (
    BLOCKED_W2,
    BLOCKED_W13,
    CORRECTION_BIAS,
    FUSED_W2,
    FUSED_W13,
    GATE_WEIGHT,
    HASH_TABLE,
    family_name,
)
from tests.unit.pages import ROOT, blocks, section, table_rows

PAGE = ROOT / "docs" / "checkpoints.md"
SIZES = {"N": 256, "K": 384}


def example(language: str) -> str:
    (block,) = (block for block in blocks(PAGE) if block.language == language)
    return block.text


@pytest.fixture
def own_layer(tmp_path, monkeypatch):
    """A folder with the two files of the page, the current one."""
    monkeypatch.chdir(tmp_path)
    exec(example("python"), {})
    (tmp_path / "own_layer.yaml").write_text(example("yaml"))


@pytest.mark.usefixtures("own_layer")
def test_the_example_runs_and_agrees(capsys):
    (command,) = re.findall(r"`run\.py (.*?)`", PAGE.read_text())
    assert run.main([*command.split(), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("own_layer: agree: 2 ranks, 8 tokens;")


def shape_of(cell: str) -> tuple[int, ...]:
    """``[N/128, K/128]`` in numbers."""
    terms = re.findall(r"([NK])(?:/(\d+))?|(1)", cell)
    return tuple(
        SIZES[letter] // int(part or 1) if letter else int(one) for letter, part, one in terms
    )


@pytest.mark.parametrize("form", WeightFormat)
def test_dtypes_and_shapes_are_those_that_the_loader_takes(form):
    rows = {row[0]: row[1:] for row in table_rows(section(PAGE.name, "## Dtypes and shapes"))}
    values, shape, scale, scale_shapes = rows[form]
    layout = LAYOUTS[form]
    assert tuple(values.split(", ")) == layout.values
    assert shape_of(shape) == (SIZES["N"], SIZES["K"] // layout.packed)
    if scale == "none":
        assert layout.scale == ()
    else:
        assert tuple(scale.split(", ")) == layout.scale
        shapes = tuple(shape_of(cell) for cell in scale_shapes.split(" or "))
        assert shapes == layout.scale_shapes(SIZES["N"], SIZES["K"])


NAMES = {
    "router": GATE_WEIGHT,
    "correction bias, of a model that has one": CORRECTION_BIAS,
    "experts of token ids (`hash_moe`)": HASH_TABLE,
    "gate of an expert": "experts.e.gate_proj.weight",
    "up of an expert": "experts.e.up_proj.weight",
    "down of an expert": "experts.e.down_proj.weight",
    "all experts' gate and up, gate rows first": FUSED_W13,
    "all experts' down": FUSED_W2,
    "gpt-oss's gate and up": BLOCKED_W13,
    "gpt-oss's down": BLOCKED_W2,
}


@pytest.mark.parametrize("tensor", NAMES)
def test_every_listed_name_is_one_that_the_loader_knows_as(tensor):
    rows = {row[0]: row[1] for row in table_rows(section(PAGE.name, "## Names"))}
    listed = [name.strip("`") for name in rows[tensor].split(", ")]
    assert {family_name(name) for name in listed} == {NAMES[tensor]}
