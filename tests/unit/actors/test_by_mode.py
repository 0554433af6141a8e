"""One input mode after the other: what is dropped in between changes no word of a result."""

import gc
import weakref

import pytest

from actors.by_mode import Keep
from actors.determinism import asks_last
from actors.driver import run_scenario
from actors.living import LivingScenario
from moe.formats import Stage
from reports.record import Mode
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"
BOTH = ("run.runtime=loopback", "inputs.modes=[exact, random]")
EXACT, RANDOM, FILE = Mode.EXACT, Mode.RANDOM, Mode.FILE
OF_THE_MOMENT = {"timing", "environment"}


def outcome(keep, *, inject=(), sets=()):
    return run_scenario(load_scenario(SMOKE, overrides=(*BOTH, *sets), injects=inject), keep=keep)


@pytest.mark.parametrize(
    ("modes", "order"),
    [
        ([EXACT, RANDOM], [EXACT, RANDOM]),
        ([RANDOM, EXACT], [EXACT, RANDOM]),
        ([FILE, RANDOM], [RANDOM, FILE]),
        ([RANDOM, FILE, EXACT], [FILE, EXACT, RANDOM]),
        ([EXACT], [EXACT]),
    ],
    ids=str,
)
def test_the_mode_that_is_asked_comes_behind_all_others(modes, order):
    assert asks_last(modes) == order


@pytest.mark.parametrize(
    ("inject", "sets"),
    [
        ((), ()),
        (("scaling_factor_twice",), ()),
        (("sum_order_varies",), ()),
        (("idle_dummy_row_kept",), ()),
    ],
    ids=["clean", "wrong", "loses bits", "idle"],
)
def test_a_result_is_the_same_whether_or_not_traces_are_kept(inject, sets):
    kept, dropped = (
        outcome(Keep(traces=traces), inject=inject, sets=sets) for traces in (True, False)
    )
    words = [one.result.model_dump(exclude=OF_THE_MOMENT) for one in (kept, dropped)]
    assert words[0] == words[1]
    assert all(report.trace.stages for run in kept.runs for report in run.reports)
    assert not any(report.trace.stages for run in dropped.runs for report in run.reports)


def test_runs_and_checks_stay_in_the_order_of_the_scenario():
    modes = "inputs.modes=[random, exact]"
    done = outcome(Keep(traces=False), sets=(modes,))
    assert [run.mode for run in done.runs] == [RANDOM, EXACT]
    asked = list(dict.fromkeys(check.mode for check in done.result.checks))
    assert asked == [RANDOM, EXACT]


def test_traces_of_one_mode_are_gone_when_the_next_ones_come(monkeypatch):
    forwards_of, left, alive = LivingScenario.forwards_of, [], []

    def watched(living, mode):
        alive.append(sum(reference() is not None for reference in left))
        reports = forwards_of(living, mode)
        left.extend(weakref.ref(rank.trace[Stage.GEMM1]["gate_up"]) for rank in reports[0])
        return reports

    monkeypatch.setattr(LivingScenario, "forwards_of", watched)
    gc.disable()  # traces are in no cycle: gigabytes cannot wait for the collector
    try:
        outcome(Keep(traces=False))
    finally:
        gc.enable()
    assert (len(left), alive) == (4, [0, 0])
