"""Two runs of one token list side by side, and a lattice of topologies, as parts of results."""

from enum import StrEnum

from pydantic import NonNegativeInt, PositiveInt

from moe.formats import Stage
from reports.json_types import Items, JsonFloat
from reports.record import Mode, Record, Verdict


class Likeness(StrEnum):
    """How alike two runs of the same tokens are."""

    SAME_BITS = "same_bits"
    """Both agree with their goldens, and every value that both have is the same."""

    ROUNDING = "rounding"
    """Both agree; bits part behind a rounding point that only one of them declares."""

    BREAKS = "breaks"
    """One does not agree, or bits part where nothing that is declared lets them."""


class Comparison(Record):
    """Two runs of the same tokens, in one mode."""

    one: str
    other: str
    mode: Mode
    likeness: Likeness
    stage: Stage | None = None
    """First stage in which bits differ; null: in none that both have kept. In exact mode, of
    cells that both certify to hold the same value; where one side has kept no trace, of any."""
    tensor: str | None = None
    rank: NonNegativeInt | None = None
    """That has the first differing cell in ``other``; null: unknown."""
    token: NonNegativeInt | None = None
    slot: NonNegativeInt | None = None
    column: NonNegativeInt | None = None
    one_value: JsonFloat | None = None
    other_value: JsonFloat | None = None
    """Both values of the first cell that differs."""
    cells: NonNegativeInt
    """Cells of the output that differ, of ``num_cells``; in exact mode, of certified ones."""
    num_cells: NonNegativeInt
    apart: JsonFloat
    """Relative Frobenius distance of the two outputs."""
    one_from_golden: JsonFloat
    other_from_golden: JsonFloat
    """Of each from its own same-recipe golden."""
    one_from_ideal: JsonFloat
    other_from_ideal: JsonFloat
    """Of each from the golden without any rounding."""
    declared: Stage | None = None
    """From this stage on what both declare lets bits differ; null: nowhere."""
    reason: str
    """Why bits may differ, or what breaks."""


class LatticeNode(Record):
    """One topology of the scenario's model, run and judged by itself."""

    name: str
    world_size: PositiveInt
    attention: dict[str, PositiveInt]
    """Degrees dp, tp and cp."""
    moe: dict[str, PositiveInt]
    """Degrees ep and tp."""
    tokens: Items[NonNegativeInt]
    """Of each attention-DP group."""
    verdict: Verdict
    stage: Stage | None = None
    """Of its first divergence."""
    summary: str


class RefusedNode(Record):
    """A topology that the rules refuse for this model, dispatcher or batch."""

    name: str
    field: str
    """The key to change."""
    message: str
    source: str


class Lattice(Record):
    """Topologies of one model and one token list, each compared with its neighbour."""

    nodes: Items[LatticeNode]
    edges: Items[Comparison]
    """In the order of the walk: expert parallelism from one rank up, then what branches off."""
    refused: Items[RefusedNode]
