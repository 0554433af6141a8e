"""One changed cell looks like no mistake: it is found, and called nothing."""

import pytest

from moe.formats import Stage
from tests.verdict.layouts import LAYOUTS
from tests.verdict.spoiling import rank_that_matters, spoiled

LAYOUT = "tp_ep_all_to_all"
CHANGES_ITS_MEANING = ("scale", "ids", "index", "m_indices", "num_recv", "handle", "live_rows")
"""Of these one changed value is another exponent, expert, row or count, and is called so."""

VALUES = [
    (stage, name)
    for stage, name in LAYOUTS[LAYOUT].traced()
    if stage is not Stage.WEIGHTS and not any(part in name for part in CHANGES_ITS_MEANING)
]


@pytest.mark.parametrize(("stage", "name"), VALUES, ids=lambda value: str(value))
def test_a_changed_cell_is_unexplained(clean_layout, stage, name):
    run = clean_layout(LAYOUT)
    rank = rank_that_matters(run, stage, name)
    traces = run.changed(stage, rank, {name: spoiled(run, stage, rank, name)})
    ledger = run.judged(traces)
    found = run.judge.diagnose(run.batch, traces, ledger)
    assert found, "nobody objects"
    assert {one.mistake for one in found.values()} == {None}
