"""``score.json``: which faults a scenario's verdict has caught, as types, and what it tells a run.

A score is taken once and kept; a later run of the same scenario, told apart by a fingerprint, can
say with which faults it would have failed, and where.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue, NonNegativeInt, ValidationError

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.json_types import Items
from reports.result import Record

FORMAT: Final = "moe-assay-score/1"

_NO_PART_OF_WHAT_RUNS: Final = ("name", "about", "inject", "expect", "allow_unsupported")
_OF_THE_MACHINE: Final = ("runtime", "device", "timeout_s")


class Fate(StrEnum):
    """What became of one fault in one scenario; each of the first three includes the next."""

    NAMED = "named"
    """Localised, and its kind of mistake named by a diagnosis."""
    LOCALISED = "localised"
    """Killed, and the first thing found is at the stage and on a rank where the fault acts."""
    KILLED = "killed"
    """The verdict is another than agree."""
    SURVIVED = "survived"
    """The verdict is agree, though a bit of a traced tensor has changed."""
    VOID = "void"
    """It found nothing to act on, or changed no bit of any traced tensor."""
    UNSUPPORTED = "unsupported"
    """It cannot run here, as one that kills a process where the ranks share one."""


KILLS: Final = frozenset({Fate.NAMED, Fate.LOCALISED, Fate.KILLED})
TRIED: Final = KILLS | {Fate.SURVIVED}


class Pair(Record):
    """One fault in one scenario; of what was found first, the stage and the rank."""

    fate: Fate
    stage: Stage | None = None
    rank: NonNegativeInt | None = None
    mistake: Mistake | None = None
    """What the diagnosis named there."""
    reason: str | None = None
    """Why it is void or unsupported."""


class ScenarioScore(Record):
    """Every fault in one scenario."""

    name: str
    fingerprint: str
    """Of what is computed and judged; see ``fingerprint``."""
    clean: str
    """The sentence of the run without a fault; unless it agrees, no fault is tried."""
    seconds: float
    pairs: dict[str, Pair]
    """By the fault's name."""


class Score(Record):
    """Every fault in every scenario."""

    format: Literal["moe-assay-score/1"] = FORMAT
    scenarios: Items[ScenarioScore]
    environment: dict[str, str | int]
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether a fault acted in every scenario, and none survived in any."""
        tried = all(TRIED & counts.keys() for counts in self.by_scenario().values())
        return tried and not self.totals()[Fate.SURVIVED]

    def by_scenario(self) -> dict[str, Counter[Fate]]:
        """How many faults came to what, scenario by scenario."""
        return {
            one.name: Counter(pair.fate for pair in one.pairs.values()) for one in self.scenarios
        }

    def by_fault(self) -> dict[str, Counter[Fate]]:
        """In how many scenarios each fault came to what."""
        counts: dict[str, Counter[Fate]] = {}
        for one in self.scenarios:
            for name, pair in one.pairs.items():
                counts.setdefault(name, Counter())[pair.fate] += 1
        return counts

    def where(self, fault: str, fate: Fate) -> list[str]:
        """Names of the scenarios in which a fault came to this."""
        return [
            one.name
            for one in self.scenarios
            if fault in one.pairs and one.pairs[fault].fate is fate
        ]

    def totals(self) -> Counter[Fate]:
        """How many pairs came to what."""
        return sum(self.by_scenario().values(), Counter[Fate]())


class ScoreError(ValueError):
    """A file that is no score this version can read."""


def fingerprint(scenario: Mapping[str, JsonValue], sources: Mapping[str, str]) -> str:
    """Equal for two runs that compute and judge the same, whatever they are called or run on.

    Args:
        scenario: as a result holds it, defaults included.
        sources: digests of what it depends on beside, by what they are of: the code, files.
    """
    run = scenario.get("run")
    assert isinstance(run, Mapping)
    said = {key: value for key, value in scenario.items() if key not in _NO_PART_OF_WHAT_RUNS}
    said["run"] = {key: value for key, value in run.items() if key not in _OF_THE_MACHINE}
    text = json.dumps([said, dict(sources)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def would_have_failed(score: Score, mark: str) -> Iterator[str]:
    """What a passed run of a scored scenario may say of itself, a sentence a fault.

    Args:
        score: as stored.
        mark: the run's ``fingerprint``; nothing is said of one that was not scored, or whose code
            or files have changed since.
    """
    for one in score.scenarios:
        if one.fingerprint == mark:
            yield from (_sentence(name, pair) for name, pair in one.pairs.items() if _fails(pair))


def _fails(pair: Pair) -> bool:
    return pair.fate in KILLS


def _sentence(fault: str, pair: Pair) -> str:
    place = "" if pair.stage is None else f" in stage {pair.stage}"
    place += "" if pair.rank is None else f" on rank {pair.rank}"
    return f"with fault {fault} this run would have failed{place}"


def write_score(score: Score, path: Path) -> None:
    """Write a score, a line a scenario; what is null is left out."""
    data = score.model_dump(mode="json", exclude_none=True)
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in data.pop("scenarios"))
    head = json.dumps(data)[1:-1]
    path.write_text(f'{{{head}, "scenarios": [\n{rows}\n]}}\n', encoding="utf-8")


def read_score(path: Path) -> Score:
    """Read what ``write_score`` wrote.

    Raises:
        ScoreError: no file, or no score.
    """
    try:
        return Score.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ScoreError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise ScoreError(f"{path}: {place}: {first['msg']}; is this a {FORMAT} file?") from error
