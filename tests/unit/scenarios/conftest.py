"""A scenario that is right, as text, and a file to put a changed one in."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
