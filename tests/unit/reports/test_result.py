import json
import math
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

import reports.result
from moe.formats import Stage
from reports.result import CheckVerdict, Mode, Result, StageRow, result_schema
from reports.result_file import ResultError, read_result, write_result

SCHEMA_FILE = Path(reports.result.__file__).with_name("result.schema.json")
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def strict_json(text: str):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def stage_row(own_worst: float) -> StageRow:
    return StageRow(
        mode=Mode.RANDOM,
        stage=Stage.GEMM1,
        rank=0,
        own_worst=own_worst,
        verdict=CheckVerdict.DISCREPANCY,
    )


def test_a_written_result_reads_back_equal(agreeing: Result, tmp_path: Path) -> None:
    write_result(agreeing, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == agreeing


@pytest.mark.parametrize("word", NON_FINITE)
def test_a_float_that_json_lacks_is_written_as_its_word(
    agreeing: Result, tmp_path: Path, word: str
) -> None:
    result = agreeing.model_copy(update={"stages": (stage_row(NON_FINITE[word]),)})
    write_result(result, tmp_path / "result.json")
    text = (tmp_path / "result.json").read_text()
    assert strict_json(text)["stages"][0]["own_worst"] == word


@pytest.mark.parametrize("word", NON_FINITE)
def test_a_float_that_json_lacks_reads_back_as_itself(
    agreeing: Result, tmp_path: Path, word: str
) -> None:
    result = agreeing.model_copy(update={"stages": (stage_row(NON_FINITE[word]),)})
    write_result(result, tmp_path / "result.json")
    own_worst = read_result(tmp_path / "result.json").stages[0].own_worst
    assert repr(own_worst) == word


def test_free_form_objects_keep_non_finite_floats_as_words(agreeing: Result) -> None:
    fields = dict(agreeing) | {"model": {"cells": [{"margin": math.inf}, -math.inf, 0.5]}}
    assert Result(**fields).model == {"cells": [{"margin": "inf"}, "-inf", 0.5]}


def test_the_published_schema_is_the_one_the_types_give() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == result_schema(), (
        "run: python -m reports.result > reports/result.schema.json"
    )


def test_the_schema_accepts_every_kind_of_result(any_result: Result) -> None:
    jsonschema.Draft202012Validator(result_schema()).validate(any_result.model_dump(mode="json"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"verdict": "fine"}, id="unknown verdict"),
        pytest.param({"colour": "green"}, id="unknown key"),
        pytest.param({"summary": None}, id="no summary"),
        pytest.param({"format": "moe-assay-result/2"}, id="another format"),
        pytest.param({"timing": {"forward": "fast"}}, id="a word for a float"),
    ],
)
def test_the_schema_refuses(agreeing: Result, change: dict) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(result_schema()).validate(
            agreeing.model_dump(mode="json") | change
        )


def test_every_field_that_is_written_is_required_by_the_schema(agreeing: Result) -> None:
    assert set(result_schema()["required"]) == set(agreeing.model_dump(mode="json"))


def test_a_write_that_fails_leaves_the_old_file_alone(
    agreeing: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full_disk(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_result(agreeing, path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"result.json": "old"}


def test_a_write_leaves_nothing_but_the_result(agreeing: Result, tmp_path: Path) -> None:
    write_result(agreeing, tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_name_that_is_no_text_is_still_written(agreeing: Result, tmp_path: Path) -> None:
    write_result(agreeing.model_copy(update={"name": "ep8\udcff"}), tmp_path / "result.json")
    assert read_result(tmp_path / "result.json").name == "ep8?"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"", "file: Invalid JSON", id="empty"),
        pytest.param(b"name: ep8_dp", "file: Invalid JSON", id="yaml"),
        pytest.param(b"\xff\xfe", "file: Invalid JSON", id="not utf-8"),
        pytest.param(b"[]", "file: Input should be an object", id="a list"),
        pytest.param(b"{}", "summary: Field required", id="fields missing"),
        pytest.param(
            b'{"format": "moe-assay-result/9"}',
            "format: Input should be 'moe-assay-result/1'",
            id="another format",
        ),
        pytest.param(b'{"ranks": [{"rank": -1}]}', "ranks.0.rank: Input", id="deep inside"),
    ],
)
def test_an_unreadable_result_is_refused_with_file_and_place(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert told in message


@pytest.mark.parametrize("name", ["absent.json", "."], ids=["no file", "a directory"])
def test_a_path_that_is_no_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        read_result(tmp_path / name)


def test_a_result_cannot_be_changed(agreeing: Result) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        agreeing.verdict = "failed"  # type: ignore[assignment]


def test_sequences_are_kept_as_tuples(agreeing: Result) -> None:
    assert agreeing.traffic[0].group == (0, 1, 2, 3, 4, 5, 6, 7)
