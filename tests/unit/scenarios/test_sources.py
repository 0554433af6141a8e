"""Digests of what a run reads: other bytes are another run, whatever the path."""

from dataclasses import replace

import pytest
from safetensors.torch import save_file

from scenarios import sources
from scenarios.loader import load_scenario
from scenarios.sources import code_digest, sources_of
from tests.unit.scenarios.test_checkpoints import bf16_layer, spec

SMOKE = load_scenario("scenarios/smoke/ep2_dp.yaml")


def on_files(inputs=None, weights=None):
    """The scenario with captured inputs, or with a checkpoint's layer 3."""
    scenario = SMOKE.scenario
    if inputs is not None:
        captured = scenario.inputs.model_copy(update={"path": str(inputs)})
        scenario = scenario.model_copy(update={"inputs": captured})
    if weights is not None:
        model = scenario.model.model_copy(update={"weights": spec(weights)})
        scenario = scenario.model_copy(update={"model": model})
    return sources_of(replace(SMOKE, scenario=scenario))


def test_a_scenario_without_files_depends_on_the_code_alone():
    assert sources_of(SMOKE) == {"code": code_digest()}


def test_captured_inputs_are_told_by_their_bytes_not_their_name(tmp_path):
    for name, content in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).write_bytes(content)
    one, same, other = (on_files(inputs=tmp_path / n) for n in ("one", "same", "other"))
    assert one == same
    assert one["inputs.path"] != other["inputs.path"]


@pytest.mark.parametrize(
    ("name", "is_same"),
    [("model.layers.3.mlp.gate.weight", False), ("model.layers.4.mlp.gate.weight", True)],
    ids=["its layer", "another layer"],
)
def test_a_checkpoint_is_told_by_the_values_of_its_layer(tmp_path, name, is_same):
    layer = bf16_layer()
    of_another = layer["model.layers.3.mlp.gate.weight"].clone()
    tensors = {**layer, "model.layers.4.mlp.gate.weight": of_another}
    save_file(tensors, tmp_path / "one.safetensors")
    changed = tensors[name].clone()
    changed[0, 0] += 1
    save_file({**tensors, name: changed}, tmp_path / "other.safetensors")
    one, other = (on_files(weights=tmp_path / f"{n}.safetensors") for n in ("one", "other"))
    assert (one["model.weights"] == other["model.weights"]) is is_same


def test_another_module_is_other_code_and_a_page_is_not(tmp_path, monkeypatch):
    digests = []
    for module in ("moe/a.py", "reports/html/page.py", "moe/b.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("x = 1\n")
        monkeypatch.setattr(sources, "_ROOT", tmp_path)
        digests.append(code_digest.__wrapped__())
    first, with_page, with_other = digests
    assert first == with_page != with_other
