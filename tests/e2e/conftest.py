"""The command line in this process, and scenario files to give to it."""

from collections.abc import Callable
from pathlib import Path

import pytest

import run

SMOKE = Path("scenarios/smoke/ep2_dp.yaml")


@pytest.fixture
def called(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``called(*arguments)``: exit code, stdout and stderr of the command line."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run.main(list(map(str, arguments)))
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def written() -> Callable[..., Path]:
    """Write the smallest shipped scenario with texts replaced, each of which must stand there."""

    def write(folder: Path, *changes: tuple[str, str], name: str = "case.yaml") -> Path:
        text = SMOKE.read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = folder / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def three(tmp_path: Path, written: Callable[..., Path]) -> Path:
    """A folder of scenarios: one agrees, one has a discrepancy, one is unsupported."""
    folder = tmp_path / "three"
    folder.mkdir()
    written(folder, name="a.yaml")
    written(folder, ("name: ep2_dp", "name: faulty\ninject: [tokens_swapped]"), name="b.yaml")
    written(
        folder,
        ("name: ep2_dp", "name: later\nrun: {backends: {gemm: deep_gemm}}"),
        name="c.yaml",
    )
    return folder
