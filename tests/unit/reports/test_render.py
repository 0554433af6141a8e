import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from moe.formats import Stage
from reports.html.render import render
from reports.result import CheckVerdict, Mode, Result, Verdict

HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>'\" \u202e{{ 7*7 }}"
TEXT_FIELDS = {"name", "about", "summary", "detail", "diagnosis", "tensor", "check", "note", "node"}
TEXT_FIELDS |= {"device", "cause", "version", "reason", "op", "reproduce", "dispatcher", "preset"}


class Page(HTMLParser):
    """Tags with their attributes, and the text outside style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.text += data

    @property
    def first_screen(self) -> str:
        """What stands above the stage map, or above the topology where there is no map."""
        return re.split("Every stage on every rank|Topology", self.text, maxsplit=1)[0]

    def ids(self) -> set[str]:
        return {attrs["id"] for _, attrs in self.tags if attrs.get("id")}


def hostile(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {k: hostile(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    return HOSTILE if isinstance(value, str) and key in TEXT_FIELDS else value


@pytest.fixture
def hostile_page(discrepant: Result, failed: Result) -> str:
    data = discrepant.model_dump(mode="json") | {"notes": [HOSTILE], "environment": {"a": HOSTILE}}
    data["ranks"] = failed.model_dump(mode="json")["ranks"]
    data["certificate"] = {
        "stages": [],
        "sums": [],
        "round": 0,
        "least_condition": HOSTILE,
        "least_share": 0.5,
        "same_topology_only": False,
        "patterns": {HOSTILE: 1.0},
        "accumulator_bits": {},
        "accumulator_bits_are": "declared",
        "smallest_relative_effect": 0.5,
        "refusal": HOSTILE,
    }
    data["backends"] = {HOSTILE: data["backends"]["gemm"]}
    return render(Result.model_validate_json(json.dumps(hostile(data))))


@pytest.mark.parametrize("told", ["gemm1", "5", "147", "21", "128-255", "gate_up"])
def test_the_first_screen_places_the_divergence(discrepant: Result, told: str) -> None:
    tiles = re.findall(r"<b>(?:<bdi>)?(.*?)(?:</bdi>)?</b>", render(discrepant))
    assert told in tiles


@pytest.mark.parametrize("told", ["-1.8125", "-0.90631", "0.0117", "77.45 x"])
def test_the_first_screen_sizes_the_divergence(discrepant: Result, told: str) -> None:
    assert told in Page(render(discrepant)).first_screen


def test_the_first_screen_says_what_the_divergence_looks_like(discrepant: Result) -> None:
    screen = Page(render(discrepant)).first_screen
    assert "Scale exponent of expert 21 off by one in K block 1" in screen
    assert "confidence in this diagnosis: high" in screen


def test_a_divergence_without_a_finding_is_shown_undiagnosed(discrepant: Result) -> None:
    screen = Page(render(discrepant.model_copy(update={"findings": ()}))).first_screen
    assert "First divergence" in screen
    assert "diagnosis" not in screen


def of_round(result: Result, number: int, *, rounds: int) -> Page:
    first = result.first_divergence.model_copy(update={"round": number})
    scenario = result.scenario | {"run": {"rounds": rounds}}
    changes = {"first_divergence": first, "scenario": scenario}
    return Page(render(result.model_copy(update=changes)))


def test_the_first_divergence_names_its_round_where_there_are_several(discrepant: Result) -> None:
    assert "round2 of 3" in of_round(discrepant, 2, rounds=3).first_screen


def test_a_single_round_is_not_named(discrepant: Result) -> None:
    assert "1 of 1" not in of_round(discrepant, 1, rounds=1).first_screen


def test_a_bitwise_divergence_shows_that_no_error_is_allowed(discrepant: Result) -> None:
    first = discrepant.first_divergence.model_copy(update={"band": 0.0})
    page = render(discrepant.model_copy(update={"first_divergence": first}))
    assert "no error allowed" in Page(page).first_screen


@pytest.mark.parametrize("told", ["rank5", "died", "combine", "4005", "killed by signal 9"])
def test_the_first_screen_names_the_lost_rank_and_its_cause(failed: Result, told: str) -> None:
    assert told in Page(render(failed)).first_screen.replace("\n", "")


def test_an_agreement_says_how_close_it_came_and_what_it_could_have_missed(
    agreeing: Result,
) -> None:
    screen = Page(render(agreeing)).first_screen
    assert "gemm1, rank 0" in screen
    assert "0.61" in screen
    assert "0.004" in screen


def test_every_verdict_has_a_word_a_colour_class_and_a_shape_of_its_own() -> None:
    banners = {
        verdict: re.search(r'<section class="verdict (\w+)">(.*?)</svg>', html, re.DOTALL)
        for verdict, html in ((v, render(make_plain(v))) for v in Verdict)
    }
    assert [banner[1] for banner in banners.values()] == list(Verdict)
    assert len({banner[2] for banner in banners.values()}) == len(Verdict)


def make_plain(verdict: Verdict) -> Result:
    return Result(
        name="plain",
        scenario={},
        verdict=verdict,
        as_expected=True,
        summary="One sentence.",
        reproduce="python run.py plain.yaml",
    )


@pytest.mark.parametrize("verdict", Verdict)
def test_a_result_with_nothing_in_it_still_has_a_page(verdict: Verdict) -> None:
    assert Page(render(make_plain(verdict))).ids() == {"reproduce"}


def test_the_page_shows_the_verdict_it_was_given(discrepant: Result) -> None:
    """Even one that contradicts the rest: the page judges nothing."""
    html = render(discrepant.model_copy(update={"verdict": Verdict.AGREE}))
    assert '<section class="verdict agree">' in html


@pytest.mark.parametrize(
    ("verdict", "as_expected", "told"),
    [
        (Verdict.DISCREPANCY, False, "discrepancy · not what the scenario expects"),
        (Verdict.DISCREPANCY, True, "discrepancy · as the scenario expects"),
        (Verdict.AGREE, False, "agree · not what the scenario expects"),
    ],
)
def test_the_verdict_says_whether_it_was_expected(
    verdict: Verdict, as_expected: bool, told: str
) -> None:
    result = make_plain(verdict).model_copy(update={"as_expected": as_expected})
    assert told in Page(render(result)).text


def test_the_page_names_the_release_whose_rules_are_modelled(agreeing: Result) -> None:
    assert "rules modelled: SGLang 0.5.21" in Page(render(agreeing)).text


@pytest.mark.parametrize(
    "told",
    [
        pytest.param("deepseek_v4", id="model"),
        pytest.param("H 512, I 256, experts 32, top-k 6, shared 1", id="sizes"),
        pytest.param("DP 8, TP 1, CP 1", id="attention"),
        pytest.param("EP 8, TP 1", id="experts"),
        pytest.param("deepep_normal", id="dispatcher"),
        pytest.param("fp8_block128", id="recipe"),
        pytest.param("sm100", id="platform"),
        pytest.param("extend", id="phase"),
        pytest.param("224 in all", id="tokens"),
    ],
)
def test_the_page_says_what_was_compared(agreeing: Result, told: str) -> None:
    assert told in re.split("What was compared", Page(render(agreeing)).text)[1]


def test_the_map_has_a_cell_for_every_stage_on_every_rank(agreeing: Result) -> None:
    titles = [
        attrs["title"]
        for tag, attrs in Page(render(agreeing)).tags
        if tag == "td" and "title" in attrs
    ]
    places = {f"{stage}, rank {rank}" for stage in Stage for rank in range(8)}
    assert {title.partition(":")[0] for title in titles} == places


def test_a_cell_tells_both_errors_in_its_title(discrepant: Result) -> None:
    assert 'title="gemm1, rank 5: 77.4 of the band, end to end 0.0021"' in render(discrepant)


def test_a_stage_that_was_not_captured_says_so(agreeing: Result) -> None:
    rows = [row for row in agreeing.stages if row.stage is not Stage.TAIL]
    html = render(agreeing.model_copy(update={"stages": rows}))
    assert html.count(": not captured") == 8


def test_ranks_beyond_sixteen_are_folded_unless_something_broke(
    make_discrepant: Callable[[int], Result],
) -> None:
    html = render(make_discrepant(17))
    before_fold = html.partition("15 ranks without a discrepancy or failure")[0]
    assert re.findall(r'<th scope="row">(\d+)</th>', before_fold) == ["2", "5"]


def test_beyond_sixteen_ranks_the_drawing_says_that_edges_are_left_out(
    make_discrepant: Callable[[int], Result],
) -> None:
    assert "17 ranks are too many to draw every edge" in Page(render(make_discrepant(17))).text


def test_both_golden_distances_are_shown_apart(agreeing: Result) -> None:
    golden = Page(render(agreeing)).text.partition("Two distances, kept apart")[2]
    assert golden.index("0.0412") < golden.index("0.0023")


def test_the_command_to_repeat_the_run_stands_in_one_block(agreeing: Result) -> None:
    command = "python run.py scenarios/ep8_dp.yaml --set inputs.seed=7"
    assert f'<pre class="copyable">{command}</pre>' in render(agreeing)


def test_hostile_text_opens_no_element(hostile_page: str, discrepant: Result) -> None:
    tags = {tag for tag, _ in Page(hostile_page).tags}
    assert tags <= {tag for tag, _ in Page(render(discrepant)).tags} | {"ul", "li"}
    assert len(Page(hostile_page).scripts) == 1


def test_hostile_text_adds_no_attribute(hostile_page: str) -> None:
    names = {name for _, attrs in Page(hostile_page).tags for name in attrs}
    assert not names & {"onerror", "src"}


def test_hostile_text_is_no_template(hostile_page: str) -> None:
    assert "49" not in Page(hostile_page).first_screen


def test_hostile_text_cannot_turn_the_reading_direction(hostile_page: str) -> None:
    assert "\u202e" not in hostile_page


def test_a_name_of_ten_thousand_characters_is_cut(agreeing: Result) -> None:
    html = render(agreeing.model_copy(update={"name": "n" * 10_000}))
    assert "n" * 81 not in html


def test_the_only_script_is_the_one_the_policy_names(hostile_page: str) -> None:
    page = Page(hostile_page)
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    (policy,) = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_the_page_asks_for_nothing_outside_itself(any_result: Result) -> None:
    html = render(any_result)
    linking = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}
    assert not [attrs for _, attrs in Page(html).tags if linking & set(attrs)]
    assert not re.search(r"url\(|@import|https?://", html)


def test_every_opened_element_is_closed(any_result: Result) -> None:
    html = render(any_result)
    for tag in ("section", "div", "table", "tr", "td", "svg", "g", "p", "ul", "details", "bdi"):
        opened, closed = len(re.findall(rf"<{tag}[\s>]", html)), html.count(f"</{tag}>")
        assert opened == closed, tag


@pytest.mark.parametrize(("num_ranks", "limit"), [(8, 300_000), (256, 2_000_000)])
def test_a_page_of_all_modes_stays_within_its_size(
    make_discrepant: Callable[[int], Result], num_ranks: int, limit: int
) -> None:
    result = make_discrepant(num_ranks)
    rows = [row.model_copy(update={"mode": mode}) for mode in Mode for row in result.stages]
    full = result.model_copy(
        update={"stages": rows, "findings": result.findings * 500, "traffic": result.traffic * 300}
    )
    assert len(render(full).encode()) < limit


def test_findings_left_out_are_counted(discrepant: Result) -> None:
    html = render(discrepant.model_copy(update={"findings": discrepant.findings * 30}))
    assert "10 more in result.json" in Page(html).text


def test_a_check_that_could_not_judge_is_on_the_first_screen(agreeing: Result) -> None:
    check = agreeing.checks[0].model_copy(
        update={"verdict": CheckVerdict.FAILED, "detail": "rank 3 handed in no trace"}
    )
    html = render(agreeing.model_copy(update={"checks": (check,)}))
    assert "rank 3 handed in no trace" in Page(html).first_screen
