"""``result.json``: what one scenario's run found, as types.

``python -m reports.result > reports/result.schema.json`` regenerates the published schema.
"""

import json
import sys
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import NonNegativeInt, PositiveInt

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.certificate_record import Certificate
from reports.comparison import Lattice
from reports.json_types import Items, JsonFloat, JsonObject
from reports.record import Mode as Mode
from reports.record import Record as Record
from reports.record import Verdict as Verdict

FORMAT: Final = "moe-assay-result/1"


class CheckVerdict(StrEnum):
    """What one check, or one stage on one rank, came to."""

    AGREE = "agree"
    DISCREPANCY = "discrepancy"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


class RankVerdict(StrEnum):
    """How a rank ended; ``released``: it waited for a rank that failed and was let go."""

    OK = "ok"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    RELEASED = "released"
    NOT_STARTED = "not_started"


class Confidence(StrEnum):
    """How well the diagnosis explains the error; ``none``: nothing explains it."""

    NONE = "none"
    LOW = "low"
    HIGH = "high"


class Check(Record):
    """One question that was asked of the run."""

    name: str
    """Contains accounts, contract, exact, band, quantiser, router or determinism."""
    mode: Mode | None = None
    verdict: CheckVerdict
    detail: str


class Divergence(Record):
    """Where and by how much a value is not what the golden model says."""

    mode: Mode
    round: PositiveInt = 1
    """Which of the forwards on the same buffers, from 1."""
    stage: Stage
    rank: NonNegativeInt
    token: NonNegativeInt | None = None
    """Global token: DP groups ascending, inside a group the sequence's order."""
    slot: NonNegativeInt | None = None
    """Top-k slot of the token."""
    expert: int | None = None
    """Logical (global) expert."""
    columns: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """Columns of the unsharded axis, first included, last excluded."""
    got: JsonFloat | None = None
    want: JsonFloat | None = None
    band: JsonFloat | None = None
    """Largest absolute error allowed at this cell; 0 where the comparison is bitwise."""
    tensor: str
    """Name of the traced tensor, e.g. ``gate_up``."""
    check: str
    """The check that found it."""
    detail: str
    size: str = ""
    """How far the values of a whole quantiser or tensor are off, in words; part of ``detail``."""


class Finding(Divergence):
    """A divergence and what kind of mistake it looks like."""

    diagnosis: str
    mistake: Mistake | None = None
    """The kind of mistake that the diagnosis names; null where it names none."""
    confidence: Confidence


class StageRow(Record):
    """One stage on one rank in one mode."""

    mode: Mode
    stage: Stage
    rank: NonNegativeInt
    own_worst: JsonFloat | None = None
    """Worst own error / band: the stage fed with its own traced input. 1 is the limit."""
    end_to_end_worst: JsonFloat | None = None
    """Worst relative row error against the same-recipe golden, inherited error included."""
    verdict: CheckVerdict


class Visibility(Record):
    """The smallest effects that a stage's comparisons would have flagged.

    An effect is a factor of 1 + e on whatever it takes in. At twice the stated e, at least 95 of
    100 are flagged; null where there is nothing of the kind, or any changed bit is flagged.
    """

    mode: Mode
    stage: Stage
    smallest_relative_effect: JsonFloat | None = None
    """On one cell."""
    of_a_row: JsonFloat | None = None
    of_a_rank: JsonFloat | None = None
    """On all that one rank computes in the stage; of the rank that shows least."""
    of_an_expert: JsonFloat | None = None
    of_a_column_block: JsonFloat | None = None
    """On 128 columns of every row."""
    note: str


class RankInfo(Record):
    """Who a rank was and how it ended."""

    rank: NonNegativeInt
    node: str
    pid: int | None = None
    device: str
    verdict: RankVerdict
    stage: Stage | None = None
    """Where the rank was when it failed or was let go."""
    cause: str | None = None


class Backend(Record):
    """What ``auto`` or a name in the scenario resolved to."""

    name: str
    version: str
    reason: str


class Traffic(Record):
    """What one collective of one group moved."""

    stage: Stage
    op: str
    group: Items[NonNegativeInt]
    """Ranks of the group."""
    payload_bytes: Items[NonNegativeInt]
    """Bytes each rank of the group handed in, in the order of ``group``."""
    predicted_bytes: Items[NonNegativeInt] = ()
    """The same as topology and routes call for; empty where they call for no such collective."""


class GoldenDistance(Record):
    """Two relative Frobenius distances, never merged: the recipe's own error, and the run's."""

    mode: Mode
    stage: Stage
    same_recipe_to_ideal: JsonFloat
    run_to_same_recipe: JsonFloat


class NoiseFloor(Record):
    """What right implementations differ by: twins of the same-recipe golden.

    They sum in fp32 and in other orders, for a sample of the tokens. It decides nothing.
    """

    mode: Mode
    stage: Stage
    twins: PositiveInt
    tokens: PositiveInt
    """How many the twins computed."""
    own_worst: JsonFloat | None = None
    """Worst own error / band of the twins; null where the golden keeps no input of the stage."""
    worst_row: JsonFloat
    """Worst relative error of a twin's row against the golden, inherited error included."""
    spread: JsonFloat
    """Largest relative Frobenius distance of a twin to the golden, inherited error included."""
    run: JsonFloat | None = None
    """The same distance of the run, over all tokens; null where it has no whole sums there."""


class WeightRow(Record):
    """What right preparation makes of one weight tensor: two relative Frobenius distances.

    Of the golden's preparation, over a sample of experts; whether a rank did the same is stage
    ``weights``.
    """

    tensor: str
    path: str
    """What preparation does to it."""
    changed_by: JsonFloat
    """Prepared weights against those that were read; bf16 under fp8 blocks or one scale a tensor is
    quantised as it is read."""
    from_ideal: JsonFloat
    """Prepared weights against those without any rounding of the recipe: drawn, or as stored."""
    num_experts: int
    """Experts looked at."""


class Result(Record):
    """Everything one scenario's run found."""

    format: Literal["moe-assay-result/1"] = FORMAT
    semantics: Literal["sglang-0.5.21"] = "sglang-0.5.21"
    """The release whose rules the golden model follows."""
    name: str
    about: str = ""
    scenario: JsonObject
    """The scenario as it ran, defaults included."""
    model: JsonObject = {}
    """Sizes and rules of the model after preset and overrides, by their config.json names."""
    verdict: Verdict
    as_expected: bool
    """Whether the verdict is the one the scenario's ``expect`` names."""
    summary: str
    """One sentence."""
    checks: Items[Check] = ()
    first_divergence: Divergence | None = None
    """The earliest stage over the modes, exact first."""
    findings: Items[Finding] = ()
    stages: Items[StageRow] = ()
    visibility: Items[Visibility] = ()
    certificate: Certificate | None = None
    """What the exact mode could prove about its inputs."""
    ranks: Items[RankInfo] = ()
    backends: dict[str, Backend] = {}
    """By axis: gemm, transport, kernels."""
    traffic: Items[Traffic] = ()
    golden: Items[GoldenDistance] = ()
    noise: Items[NoiseFloor] = ()
    weights: Items[WeightRow] = ()
    lattice: Lattice | None = None
    """Other topologies of the scenario, where it asks to be compared with them."""
    notes: Items[str] = ()
    timing: dict[str, JsonFloat] = {}
    """Seconds by what they were spent on."""
    environment: dict[str, str | int] = {}
    reproduce: str
    """A command that runs the same again."""


def result_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what is written."""
    schema = Result.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": FORMAT}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(result_schema(), indent=2) + "\n")
