import ast
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

import scenarios.schema
from scenarios.schema import Scenario, Spec


@pytest.fixture
def raw(right):
    return yaml.safe_load(right)


def read(raw):
    return Scenario.model_validate_json(json.dumps(raw))


def sections(section=Scenario):
    yield section
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Spec):
            yield from sections(field.annotation)


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ("about", ""),
        ("model.layer", "moe"),
        ("model.weights.kind", "synthetic"),
        ("parallel.attention.tp", 1),
        ("parallel.attention.cp", 1),
        ("parallel.moe.tp", 1),
        ("moe.runner", "auto"),
        ("moe.layout", "auto"),
        ("moe.expanded", "auto"),
        ("moe.shared_experts", "auto"),
        ("moe.reduce", "auto"),
        ("moe.redundant_experts", 0),
        ("moe.placement", "contiguous"),
        ("moe.strict_shapes", False),
        ("batch.padding", "auto"),
        ("batch.routing.kind", "router"),
        ("batch.routing.weights", "auto"),
        ("run.runtime", "ray"),
        ("run.device", "auto"),
        ("run.rounds", 1),
        ("run.timeout_s", 120.0),
        ("run.backends.gemm", "auto"),
        ("run.backends.transport", "auto"),
        ("run.backends.kernels", "auto"),
        ("inject", ()),
        ("compare", None),
        ("allow_unsupported", False),
        ("expect.verdict", "agree"),
    ],
)
def test_a_key_left_out_has_its_documented_default(raw, path, default):
    value = read(raw)
    for key in path.split("."):
        value = getattr(value, key)
    assert value == default


@pytest.mark.parametrize(
    "path",
    [
        "name",
        "model",
        "parallel",
        "parallel.world_size",
        "parallel.attention.dp",
        "parallel.moe.ep",
        "moe.dispatcher",
        "moe.recipe",
        "platform",
        "batch.phase",
        "batch.tokens",
        "inputs.modes",
    ],
)
def test_a_required_key_cannot_be_left_out(raw, path):
    *parents, last = path.split(".")
    section = raw
    for key in parents:
        section = section[key]
    del section[last]
    with pytest.raises(ValidationError) as caught:
        read(raw)
    assert [(e["type"], e["loc"]) for e in caught.value.errors()] == [
        ("missing", tuple(path.split(".")))
    ]


def test_a_resolved_scenario_reads_back_as_itself(raw):
    raw["expect"] = {"verdict": "discrepancy", "stage": "gemm1", "fault": "f", "mode": "random"}
    scenario = read(raw)
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


def test_the_json_schema_accepts_a_bare_and_a_full_expectation(raw):
    schema = Scenario.model_json_schema()
    jsonschema.validate({**raw, "expect": "failed"}, schema)
    jsonschema.validate({**raw, "expect": {"verdict": "discrepancy", "stage": "tail"}}, schema)


def test_the_json_schema_refuses_an_unknown_key(raw):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, "nam": "x"}, Scenario.model_json_schema())


@pytest.mark.parametrize("section", list(sections()), ids=lambda s: s.__name__)
def test_every_key_says_what_it_means(section):
    assert all(field.description for field in section.model_fields.values())


def test_every_section_is_exported():
    names = {section.__name__ for section in sections()}
    assert names <= set(scenarios.schema.__all__)


@pytest.mark.parametrize("word", ["agree", "failed", "unsupported"])
def test_a_bare_word_is_the_verdict(raw, word):
    assert read({**raw, "expect": word}).expect.verdict == word


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("expect", "discrepancy", "needs its stage"),
        ("expect", {"verdict": "agree", "stage": "gemm1"}, "belong to verdict discrepancy"),
        ("expect", {"verdict": "failed", "fault": "x"}, "belong to verdict discrepancy"),
        ("inputs", {"modes": ["random"]}, "seed is required"),
        ("inputs", {"modes": ["file", "random"], "path": "x"}, "seed is required"),
        ("inputs", {"modes": ["random", "random"], "seed": 1}, "names one twice"),
        ("inputs", {"modes": ["file"]}, "path and mode 'file' go together"),
        ("inputs", {"modes": ["random"], "seed": 1, "path": "x"}, "path and mode 'file' go"),
        ("inputs", {"modes": [], "seed": 1}, "at least 1 item"),
        ("inputs", {"modes": ["random"], "seed": 1 << 48}, "less than or equal to 281474976710655"),
        ("model", {}, "give one of preset and hf_config"),
        ("model", {"preset": "mixtral", "hf_config": "x"}, "give one of preset and hf_config"),
        ("model", {"preset": "mixtral", "weights": {"kind": "safetensors"}}, "needs both path"),
        ("model", {"preset": "mixtral", "weights": {"path": "x"}}, "belong to kind 'safetensors'"),
        ("run", {"timeout_s": 0}, "greater than 0"),
        ("run", {"timeout_s": float("inf")}, "finite number"),
        ("run", {"rounds": True}, "valid integer"),
        ("run", {"backends": {"gemm": "deepgemm"}}, "is not one of auto, torch, deep_gemm or"),
        ("batch", {"phase": "extend", "tokens": []}, "at least 1 item"),
        ("batch", {"phase": "extend", "tokens": [-1]}, "greater than or equal to 0"),
        ("batch", {"phase": "extend", "tokens": [True]}, "valid integer"),
        ("batch", {"phase": "extend", "tokens": [1.0]}, "valid integer"),
        ("name", "a/b", "is no name"),
        ("name", "..", "is no name"),
        ("name", "a" * 101, "is no name"),
        ("name", "a\n", "is no name"),
        ("name", "", "is no name"),
    ],
)
def test_what_a_section_alone_rules_out(raw, section, value, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        read({**raw, section: value})


def test_file_inputs_need_no_seed(raw):
    raw["inputs"] = {"modes": ["file"], "path": "captured.safetensors"}
    assert read(raw).inputs.seed == 0


@pytest.mark.parametrize("axis", ["gemm", "transport", "kernels"])
def test_a_backend_may_be_an_import_path(raw, axis):
    raw["run"] = {"backends": {axis: "my_package.my_module:MyClass"}}
    assert getattr(read(raw).run.backends, axis) == "my_package.my_module:MyClass"


@pytest.mark.parametrize("value", ["auto", True, False])
def test_expanded_is_a_word_or_a_truth_value(raw, value):
    raw["moe"]["expanded"] = value
    assert read(raw).moe.expanded == value


@pytest.mark.parametrize("value", ["true", None, 2])
def test_expanded_is_nothing_else(raw, value):
    raw["moe"]["expanded"] = value
    with pytest.raises(ValidationError, match="Input should be 'auto', True or False"):
        read(raw)


def test_reading_a_scenario_imports_no_torch():
    root = Path(scenarios.schema.__file__).parents[1]
    pending, seen = [root / "scenarios" / "loader.py", root / "scenarios" / "catalog.py"], set()
    while pending:
        file = pending.pop()
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], file
            paths = [root.joinpath(*name.split(".")) for name in names]
            near = [path.with_suffix(".py") for path in paths]
            near += [path / "__init__.py" for path in paths]
            pending += [path for path in near if path.is_file() and path not in seen]
    assert root / "moe" / "formats.py" in seen
