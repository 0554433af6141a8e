"""A scenario and a sweep that are right, as text, and files to put changed ones in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios.errors import ScenarioError
from scenarios.sweep import ExpandedSweep, load_path

RIGHT = """\
name: small
model:
  preset: deepseek_v4
  overrides: {hidden_size: 256, moe_intermediate_size: 128, n_routed_experts: 8}
parallel:
  world_size: 2
  attention: {dp: 2}
  moe: {ep: 2}
moe:
  dispatcher: deepep_normal
  recipe: fp8_block128
platform: sm100
batch:
  phase: extend
  tokens: [5, 3]
inputs: {modes: [random], seed: 7}
"""

SWEEP = """\
sweep: small
about: two topologies
base:
  model:
    preset: deepseek_v4
    overrides: {hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}
  parallel: {world_size: 2}
  moe: {recipe: bf16}
  platform: sm100
  batch: {phase: extend}
  inputs: {modes: [random], seed: 7}
axes:
  topology:
    tp: {parallel.attention: {dp: 1, tp: 2}, parallel.moe: {ep: 1, tp: 2}, batch.tokens: [9]}
    dp: {parallel.attention: {dp: 2}, parallel.moe: {ep: 2}, batch.tokens: [5, 0]}
  moe.dispatcher: [standard, deepep_normal]
  batch.phase: [extend, decode]
"""


@pytest.fixture
def right() -> str:
    return RIGHT


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write the right scenario with replacements (old text, new text), each of which must match."""

    def write(*changes: tuple[str, str], more: str = "") -> Path:
        text = RIGHT
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} does not stand once in the right scenario"
            text = text.replace(old, new)
        path = tmp_path / "small.yaml"
        path.write_text(text + more, encoding="utf-8")
        return path

    return write


@pytest.fixture
def expanded(tmp_path):
    """Load the small sweep, texts replaced and lines added, with arguments of ``load_path``."""

    def load(*changes: tuple[str, str], more: str = "", **arguments) -> ExpandedSweep:
        text = SWEEP
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} does not stand once in the sweep"
            text = text.replace(old, new)
        path = tmp_path / "small.yaml"
        path.write_text(text + more)
        sweep = load_path(path, **arguments)
        assert isinstance(sweep, ExpandedSweep)
        return sweep

    return load


@pytest.fixture
def problems(expanded):
    """What is wrong with the small sweep after changes, a text each."""

    def find(*changes: tuple[str, str], more: str = "", **arguments) -> list[str]:
        with pytest.raises(ScenarioError) as caught:
            expanded(*changes, more=more, **arguments)
        return list(map(str, caught.value.problems))

    return find
