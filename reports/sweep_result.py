"""``sweep.json``: what became of every row of a sweep, as types; each row has its own result."""

from typing import Final, Literal

from pydantic import NonNegativeInt

from reports.json_types import Items
from reports.record import Record, Verdict

FORMAT: Final = "moe-assay-sweep/1"


class Attempt(Record):
    """A run of a row that was not counted: a rank died, or came to its time limit."""

    verdict: Verdict
    summary: str
    seconds: float


class RanRow(Record):
    """A row that ran, or that this version or machine cannot run."""

    name: str
    values: dict[str, str]
    """Axis -> name of its value."""
    verdict: Verdict
    as_expected: bool
    summary: str
    """The result's one sentence."""
    seconds: float
    """From the scenario to its written page."""
    result: str | None
    """The row's result.json, from the folder of sweep.json; null where its input did not fit."""
    earlier: Items[Attempt]
    """Runs before the one that counts."""


class LoggedRow(Record):
    """A line of ``rows.jsonl``."""

    digest: str
    """Of the scenario, the code, and the files that it reads."""
    row: RanRow


class NotRunRow(Record):
    """A legal row that the sweep ended before: it was interrupted, or a row's input did not fit."""

    name: str
    values: dict[str, str]


class RefusedRow(Record):
    """A row that rules refuse."""

    name: str
    values: dict[str, str]
    rules: dict[str, str]
    """Rule -> what is wrong with this row."""


class ExcludedRow(Record):
    """A row that the sweep leaves out on purpose."""

    name: str
    values: dict[str, str]
    because: str


class RefusingRule(Record):
    """A rule that refuses rows."""

    name: str
    kind: str
    field: str
    """The key to change."""
    source: str
    """Where upstream says so."""
    rows: NonNegativeInt
    first: str
    """The first row that breaks it."""
    message: str
    """What is wrong with that row."""


class ImpossibleCombinations(Record):
    """Combinations of values that no legal row has."""

    rules: Items[str]
    """Together they refuse every row that has one of the combinations."""
    combinations: NonNegativeInt


class Coverage(Record):
    """What the rows of a sweep cover that runs some of its product."""

    strategy: str
    """`pairs` or `triples`."""
    asked: NonNegativeInt
    """Pairs or triples of values in the product."""
    covered: NonNegativeInt
    """Those that a legal row has."""
    impossible: Items[ImpossibleCombinations]
    """The others; every one is proven."""


class SweepResult(Record):
    """Everything one sweep found, rows in the order of the product."""

    format: Literal["moe-assay-sweep/1"] = FORMAT
    name: str
    about: str
    reproduce: str
    """The command that runs it again."""
    axes: dict[str, Items[str]]
    """In order, the last varies fastest."""
    counts: dict[str, NonNegativeInt]
    """Rows by verdict, not_run, refused, excluded."""
    seconds: float
    rows: Items[RanRow]
    not_run: Items[NotRunRow]
    """Empty if the sweep ran to its end."""
    rules: Items[RefusingRule]
    """A row counts for each rule that it breaks."""
    refused: Items[RefusedRow]
    excluded: Items[ExcludedRow]
    coverage: Coverage | None
    """Null where every row of the product was asked for."""
    warnings: Items[str]
