import pytest

from moe.formats import Stage
from reports.html.topology import EXPERTS, OUTPUT, ROW_TOPS, TOKENS, Drawing, draw_topology
from reports.result import Result


def drawing_of(result: Result) -> Drawing:
    drawing = draw_topology(result)
    assert drawing is not None
    return drawing


def with_parallel(result: Result, *, dp: int, tp: int, ep: int, moe_tp: int, **moe) -> Result:
    scenario = result.scenario | {
        "parallel": {
            "world_size": dp * tp,
            "attention": {"dp": dp, "tp": tp, "cp": 1},
            "moe": {"ep": ep, "tp": moe_tp},
        },
        "batch": {"tokens": [3] * dp},
        "moe": {"dispatcher": "standard", **moe},
    }
    return result.model_copy(update={"scenario": scenario})


def row(drawing: Drawing, index: int) -> list:
    return [box for box in drawing.boxes if box.top == ROW_TOPS[index]]


def test_every_rank_stands_in_all_three_rows(agreeing: Result) -> None:
    assert [len(row(drawing_of(agreeing), i)) for i in (TOKENS, EXPERTS, OUTPUT)] == [8, 8, 8]


def test_a_rank_shows_its_tokens(agreeing: Result) -> None:
    texts = [box.text for box in row(drawing_of(agreeing), TOKENS)]
    counts = "17 tokens, idle, 33 tokens, 64 tokens, 5 tokens, 64 tokens, 1 token, 40 tokens"
    assert texts == counts.split(", ")


def test_a_rank_shows_its_experts(agreeing: Result) -> None:
    texts = [box.text for box in row(drawing_of(agreeing), EXPERTS)]
    assert texts[:2] + texts[-1:] == ["experts 0-3", "experts 4-7", "experts 28-31"]


def test_ranks_that_split_experts_show_the_same_ones(agreeing: Result) -> None:
    drawing = drawing_of(with_parallel(agreeing, dp=2, tp=2, ep=2, moe_tp=2))
    texts = [box.text for box in row(drawing, EXPERTS)]
    assert texts == [
        "experts 0-15, part 1/2",
        "experts 0-15, part 2/2",
        "experts 16-31, part 1/2",
        "experts 16-31, part 2/2",
    ]


def test_shuffled_experts_are_counted_not_numbered(agreeing: Result) -> None:
    shuffled = with_parallel(agreeing, dp=4, tp=1, ep=4, moe_tp=1, placement="shuffled")
    assert {box.text for box in row(drawing_of(shuffled), EXPERTS)} == {"8 experts"}


def test_groups_of_several_ranks_are_framed(agreeing: Result) -> None:
    drawing = drawing_of(with_parallel(agreeing, dp=2, tp=4, ep=8, moe_tp=1))
    assert len(drawing.outlines) == 4, "two attention-DP groups, before and after the experts"


def test_an_idle_rank_sends_nothing_and_gets_nothing(agreeing: Result) -> None:
    busy, ranks = 7, 8
    assert drawing_of(agreeing).edges.count("M") == 2 * busy * ranks


def test_a_clean_run_has_nothing_broken(agreeing: Result) -> None:
    drawing = drawing_of(agreeing)
    assert drawing.broken_edges == ""
    assert "broken" not in {box.style for box in drawing.boxes}


def test_a_wrong_combine_breaks_the_edges_into_its_rank(discrepant: Result) -> None:
    drawing = drawing_of(discrepant)
    ends = {curve.rsplit(" ", 2)[1] for curve in drawing.broken_edges.split("M")[1:]}
    assert drawing.broken_edges.count("M") == 8
    assert ends == {str(row(drawing, OUTPUT)[2].centre)}


def test_a_wrong_gemm_breaks_its_rank_among_the_experts(discrepant: Result) -> None:
    heads = [box.head for box in row(drawing_of(discrepant), EXPERTS) if box.style == "broken"]
    assert heads == ["✕ rank 5"]


def test_a_lost_rank_of_unknown_stage_is_broken_in_every_row(failed: Result) -> None:
    ranks = [rank.model_copy(update={"stage": None}) for rank in failed.ranks]
    drawing = drawing_of(failed.model_copy(update={"ranks": ranks}))
    assert [box.head for box in drawing.boxes if box.style == "broken"] == ["✕ rank 5"] * 3


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_a_place_that_can_break(agreeing: Result, stage: Stage) -> None:
    rows = [
        r.model_copy(update={"verdict": "discrepancy"}) if (r.stage, r.rank) == (stage, 3) else r
        for r in agreeing.stages
    ]
    drawing = drawing_of(agreeing.model_copy(update={"stages": rows}))
    assert [box.head for box in drawing.boxes if box.style == "broken"] == ["✕ rank 3"]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param({}, id="empty"),
        pytest.param({"parallel": 8}, id="parallel is a number"),
        pytest.param({"parallel": {"world_size": "8"}}, id="world_size is text"),
        pytest.param(
            {"parallel": {"world_size": 8, "attention": {"dp": 3}, "moe": {"ep": 8}}},
            id="degrees do not divide",
        ),
        pytest.param(
            {"parallel": {"world_size": 8, "attention": {"dp": 0}, "moe": {"ep": -8}}},
            id="degrees below one",
        ),
    ],
)
def test_a_scenario_that_describes_no_ranks_gets_no_drawing(
    agreeing: Result, scenario: dict
) -> None:
    assert draw_topology(agreeing.model_copy(update={"scenario": scenario})) is None
