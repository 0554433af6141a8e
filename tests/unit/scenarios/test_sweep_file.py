"""What is wrong with a sweep file is said with line and field, once."""

import pytest

WRONG = {
    "base key": (
        [("  platform: sm100", "  platfrom: sm100")],
        "line 9: platfrom: unknown key; did you mean 'platform'?",
    ),
    "base value": (
        [("recipe: bf16", "recipe: bf17")],
        "line 8: moe.recipe: 'bf17' is not one of",
    ),
    "axis value": (
        [("[standard, deepep_normal]", "[standard, deepep]")],
        "line 16: moe.dispatcher: 'deepep' is not one of",
    ),
    "axis key": (
        [("batch.phase: [extend", "batch.phases: [extend")],
        "line 17: batch.phases: unknown key; did you mean 'phase'?",
    ),
    "bundled key": (
        [("parallel.moe: {ep: 2}", "parallel.moe: {pe: 2}")],
        "line 15: parallel.moe.pe: unknown key",
    ),
    "key in no section": (
        [("batch.phase: [extend", "platform.phase: [extend")],
        "line 17: platform.phase: 'platform' holds no keys",
    ),
    "missing key": ([("  platform: sm100\n", "")], "platform: is required"),
    "odd number": ([("seed: 7}", "seed: 1e3}")], "YAML wants 1.0e+3"),
    "name in base": (
        [("base:", "base:\n  name: small")],
        "line 4: base.name: a row is named after its values",
    ),
    "unknown section": (
        [("about: two topologies", "abuot: two")],
        "line 2: abuot: unknown key; did you mean 'about'?",
    ),
    "sweep name": ([("sweep: small", "sweep: a/b")], "line 1: sweep: 'a/b' is no name"),
    "sweep number": ([("sweep: small", "sweep: 3")], "line 1: sweep: 3 was read; must be text"),
    "no base": ([("base:", "about_base:")], "base: nothing (null) was read"),
    "no axes": ([("axes:", "exes:")], "axes: nothing (null) was read"),
    "axis without values": (
        [("[extend, decode]", "[]")],
        "line 17: axes.batch.phase: has no value",
    ),
    "axis of one value": (
        [("[extend, decode]", "extend")],
        "line 17: axes.batch.phase: 'extend' was read; must be a list of values",
    ),
    "equal values": (
        [("[extend, decode]", "[extend, extend]")],
        "line 17: axes.batch.phase: two of its values are called 'extend'",
    ),
    "nameless value": (
        [("batch.phase: [extend, decode]", "moe.switches: [{deterministic: true}]")],
        "line 17: axes.moe.switches[0]: {'deterministic': True} makes no name of a row",
    ),
    "odd name": ([("    dp: {", "    d/p: {")], "line 15: axes.topology.d/p: makes no name"),
    "bundle without keys": (
        [("topology:\n", "topology:\n    none: 3\n")],
        "line 14: axes.topology.none: 3 was read; must be the keys that it sets",
    ),
    "axis of names": (
        [("batch.phase: [extend, decode]", "name: [a, b]")],
        "line 17: axes.name: sets name, but a row is named after its values",
    ),
    "section and a key in it": (
        [("topology:\n", "topology:\n    both: {moe: {}, moe.recipe: bf16}\n")],
        "line 14: axes.topology.both.moe.recipe: lies in moe, which this value sets as well",
    ),
    "key of two axes": (
        [("  moe.dispatcher: [", "  parallel.moe.ep: [")],
        "line 16: axes.parallel.moe.ep: sets parallel.moe.ep; so does axis 'topology'",
    ),
    "name too long": (
        [("    tp: {", f"    {'t' * 100}: {{")],
        "is no name: up to 100 letters",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_has_line_and_field(problems, case):
    changes, said = WRONG[case]
    assert [problem for problem in problems(*changes) if said in problem], problems(*changes)


def test_what_is_wrong_with_every_row_is_said_once(problems):
    assert len(problems(("recipe: bf16", "recipe: bf17"), ("platform: sm100", "platform: s"))) == 2


def test_a_wrong_value_does_not_bring_up_what_rules_refuse(problems):
    assert len(problems(("[extend, decode]", "[extend, encode]"))) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{topologie: dp, because: slow}", "no such axis; did you mean 'topology'?"),
        ("{topology: ep, because: slow}", "'ep' is not one of tp, dp"),
        ("{topology: dp}", "because: nothing (null) was read"),
        ("{because: slow}", "names no axis"),
        ("dp", "must be axes with the values to leave out"),
    ],
    ids=["axis", "value", "no reason", "no axis", "no row"],
)
def test_a_wrong_exclusion_is_refused(problems, row, said):
    (problem,) = problems(more=f"exclude:\n  - {row}\n")
    assert said in problem
    assert problem.startswith("line 19: exclude[0]")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            "strategy: paris\n",
            "strategy: 'paris' is not one of all, pairs, triples; did you mean 'pairs'?",
        ),
        ("salt: many\n", "salt: 'many' was read; must be a whole number"),
        ("seeds: 7\n", "seeds: 7 was read; must be a list of whole numbers"),
        ("seeds: [7, 7]\n", "seeds: names a seed twice"),
    ],
    ids=["strategy", "salt", "seeds", "twice"],
)
def test_a_wrong_choice_of_rows_says_what_to_write(problems, more, told):
    assert any(told in problem for problem in problems(more=more))
