"""What the pages on scope and platforms say is what the tables in the code say."""

import re
from pathlib import Path

from moe.formats import Platform
from moe.platforms import PLATFORMS, PlatformFacts
from scenarios.scope import NO_SWITCH, OUT_OF_SCOPE

DOCS = Path(__file__).parents[2] / "docs"


def table(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = (DOCS / page).read_text().partition(f"\n{heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group(0).splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_what_is_out_of_scope_is_listed_in_the_words_of_the_messages():
    assert table("scope.md", "## Out of scope") == [[row.what, row.why] for row in OUT_OF_SCOPE]


def test_variables_that_are_no_switch_are_listed_in_the_words_of_the_messages():
    listed = table("scope.md", "## Switches that are none")
    assert listed == [[row.what, row.why] for row in NO_SWITCH]


def cells(facts: PlatformFacts) -> list[str]:
    """A platform's column, in the order of its fields."""
    shown = {True: "yes", False: "no", None: "none"}
    return [
        str(facts.activation_scales),
        str(facts.low_latency_scales),
        ", ".join(map(str, facts.tile_heights)),
        shown[facts.has_slabs],
        str(facts.wide_segment_rows or "none"),
        ", ".join(facts.native_recipes),
        facts.device,
    ]


def test_every_fact_of_every_platform_is_in_the_table():
    columns = list(zip(*table("platforms.md", "## Facts"), strict=True))[1:]
    assert [list(column) for column in columns] == [cells(PLATFORMS[p]) for p in Platform]
