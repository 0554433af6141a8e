from pathlib import Path

import pytest

from scenarios.errors import ScenarioError
from scenarios.paths import expand_paths


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("b.yaml", "a.yaml", "notes.md", "deep/er/c.yaml", "empty/readme.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["b.yaml", "a.yaml"], ["b.yaml", "a.yaml"]),
        (["."], ["a.yaml", "b.yaml", "deep/er/c.yaml"]),
        (["deep"], ["deep/er/c.yaml"]),
        (["*.yaml"], ["a.yaml", "b.yaml"]),
        (["*"], ["a.yaml", "b.yaml", "deep/er/c.yaml"]),
        (["**/c.yaml"], ["deep/er/c.yaml"]),
        (["b.yaml", "."], ["b.yaml", "a.yaml", "deep/er/c.yaml"]),
        (["notes.md"], ["notes.md"]),
        ([], []),
    ],
    ids=lambda value: " ".join(value) or "none",
)
def test_arguments_become_files_in_order_each_once(arguments, files):
    assert expand_paths(arguments) == [Path(file) for file in files]


@pytest.mark.usefixtures("tree")
def test_every_argument_without_a_file_is_named():
    with pytest.raises(ScenarioError) as caught:
        expand_paths(["a.yaml", "none.yaml", "x*.yaml", "empty"])
    assert str(caught.value).splitlines() == [
        "arguments: 3 problem(s)",
        "  none.yaml: no such file or directory",
        "  x*.yaml: matches no *.yaml file",
        "  empty: no *.yaml file in this directory",
    ]
