"""A fixed slice of ``benchmarks/awkward_tokens.py``: awkward token lists find nothing to report."""

from collections.abc import Iterator

import pytest

from benchmarks.awkward_tokens import FOLDER, Case, cases, run

LABELS = ("group 0 idle", "one token", "as many tokens as experts")


def slice_of_all() -> Iterator[object]:
    """Of every file one token list, another in each file; the benchmark has them all."""
    for number, path in enumerate(sorted(FOLDER.glob("*.yaml"))):
        label = LABELS[number % len(LABELS)]
        for case in cases(path, seeds=1, large_seeds=0, hidden_size=128):
            if case.label == label:
                yield pytest.param(case, id=f"{path.stem}-{case.label}")


@pytest.mark.parametrize("case", list(slice_of_all()))
def test_a_clean_run_of_an_awkward_token_list_agrees(case: Case):
    outcome = run(case)
    assert outcome.alarm is None
    assert outcome.worst <= 1
