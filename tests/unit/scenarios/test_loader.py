import json

import pytest

from scenarios.errors import ScenarioError
from scenarios.inject import FaultSpec
from scenarios.loader import load_scenario


def problems(path, **options):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path, **options)
    return str(caught.value).splitlines()[1:]


def the_problem(path, **options):
    found = problems(path, **options)
    assert len(found) == 1, found
    return found[0].strip()


def test_a_right_file_gives_its_model_and_no_notes(written):
    loaded = load_scenario(written())
    assert loaded.model.hidden_size == 256
    assert loaded.model.num_experts_per_tok == 6
    assert (loaded.faults, loaded.notes) == ((), ())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("[5, 3]", "[5, 3, 1]"), "line 15: batch.tokens: 3 counts for 2 attention-DP groups"),
        (
            ("world_size: 2", "world_size: 4"),
            "line 7: parallel.attention: attention dp(2) * tp(1) * cp(1) = 2 != world_size(4)",
        ),
        (
            ("n_routed_experts: 8", "n_routed_experts: 9"),
            "line 8: parallel.moe.ep: n_routed_experts(9) + redundant_experts(0) = 9 is not",
        ),
        (("tokens:", "token:"), "line 15: batch.token: unknown key; did you mean 'tokens'?"),
        (
            ("deepep_normal", "deepep-normal"),
            "line 10: moe.dispatcher: 'deepep-normal' is not one of standard, flashinfer,",
        ),
        (("sm100", "yes"), "line 12: platform: 'yes' is true in YAML; quote it if text is meant"),
        (("seed: 7", "seed: 1e3"), "line 16: inputs.seed: '1e3' was read as text (YAML wants"),
        (("seed: 7", "seed: 010"), "line 16: inputs.seed: '010' is octal in YAML and means 8"),
        (("seed: 7", "seed: -7"), "line 16: inputs.seed: -7 was read (a number); must be greater"),
        (
            ("hidden_size: 256", "hiden_size: 256"),
            "line 4: model.overrides.hiden_size: changes nothing in this model's MoE layer; did",
        ),
        (
            ("hidden_size: 256", "hidden_size: 1e2"),
            "line 4: model.overrides.hidden_size: '1e2' was read as text (YAML wants 1.0e+2)",
        ),
        (
            ("hidden_size: 256", "hidden_size: 200"),
            "line 11: moe.recipe: fp8_block128 needs whole groups; split: hidden_size(200) into",
        ),
        (
            ("preset: deepseek_v4", "preset: deepsek_v4"),
            "line 3: model.preset: 'deepsek_v4' is not one of deepseek_v4, deepseek_v3,",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_named_with_line_and_key(written, change, line):
    found = problems(written(change))
    assert [p for p in found if p.strip().startswith(line)], found


def test_the_line_of_a_repeated_key_is_the_second(written):
    path = written(more="platform: sm90\n")
    assert the_problem(path) == "line 17: platform: is given twice, first in line 12"


def test_problems_of_every_kind_come_at_once_in_file_order(written):
    path = written(
        ("hidden_size: 256", "hiden_size: 256"),
        ("world_size: 2", "world_size: 4"),
        ("deepep_normal", "deepep"),
        ("[5, 3]", "[5]"),
        more="inject: [Bad]\nrun: {timeout_s: 1e2}\nrun: {}\n",
    )
    keys = [line.split(": ")[:2] for line in problems(path)]
    assert keys == [
        ["  line 4", "model.overrides.hiden_size"],
        ["  line 7", "parallel.attention"],
        ["  line 8", "parallel.moe"],
        ["  line 10", "moe.dispatcher"],
        ["  line 15", "batch.tokens"],
        ["  line 17", "inject[0]"],
        ["  line 18", "run.timeout_s"],
        ["  line 19", "run"],
    ]


def test_a_lone_surrogate_is_refused(written):
    path = written(more='about: "\\ud800"\n')
    assert the_problem(path) == "some text in it is no Unicode: a lone surrogate"


def test_a_missing_section_hides_no_other_problem(written):
    found = problems(written(("platform: sm100\n", ""), ("world_size: 2", "world_size: 3")))
    assert "  platform: is required" in found
    assert "attention dp(2) * tp(1) * cp(1) = 2 != world_size(3)" in "".join(found)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("moe.dispatchr=standard", "--set: moe.dispatchr: unknown key; did you mean 'dispatcher'?"),
        ("batch.tokens=[1]", "--set: batch.tokens: 1 counts for 2 attention-DP groups"),
        ("inputs.seed=1e3", "--set: inputs.seed: '1e3' was read as text (YAML wants 1.0e+3)"),
        ("inputs.seed=", "--set: inputs.seed: nothing (null) was read"),
        ("inputs.seed", "--set: 'inputs.seed' is no key=value"),
        ("=3", "--set: '=3' is no key=value"),
        ("moe..recipe=bf16", "--set: 'moe..recipe=bf16' is no key=value"),
        ("moe.recipe=[", "--set: moe.recipe: '[' is not YAML"),
        ("name.x=1", "--set: name.x: 'name' holds no keys"),
        ("model.overrides.hiden_size=1", "--set: model.overrides.hiden_size: changes nothing"),
        ("model.hf_config=x.json", "--set: model: give one of preset and hf_config"),
    ],
)
def test_set_goes_through_the_same_checks_under_its_own_name(written, option, line):
    found = problems(written(), overrides=[option])
    wanted = line.replace("--set: model: ", "model: ")
    assert [p for p in found if wanted in p], found


def test_set_wins_over_the_file_and_the_last_set_over_the_first(written):
    options = ["inputs.seed=8", "inputs.seed=9", "model.overrides.hidden_size=512", "about=on it"]
    loaded = load_scenario(written(), overrides=options)
    assert loaded.scenario.inputs.seed == 9
    assert loaded.model.hidden_size == 512
    assert loaded.model.moe_intermediate_size == 128
    assert loaded.scenario.about == "on it"


def test_set_can_add_a_section(written):
    loaded = load_scenario(written(), overrides=["run.backends.gemm=torch"])
    assert loaded.scenario.run.backends.gemm == "torch"


def test_set_of_a_whole_section_forgets_the_files_lines(written):
    option = "parallel={world_size: 4, attention: {dp: 2}, moe: {ep: 4}}"
    assert problems(written(), overrides=[option])[0].startswith("  --set: parallel.attention: ")


def test_injected_faults_follow_the_files_own(written):
    loaded = load_scenario(written(more="inject: [first]\n"), injects=["second:rank=1"])
    assert loaded.faults == (FaultSpec("first", {}), FaultSpec("second", {"rank": 1}))
    assert loaded.scenario.inject == ("first", "second:rank=1")


@pytest.mark.parametrize(
    ("more", "injects", "line"),
    [
        ("inject: [swap_gat]\n", [], "line 17: inject[0]: 'swap_gat' is not one of swap_gate;"),
        ("", ["swap_gat"], "--inject: inject[0]: 'swap_gat' is not one of swap_gate;"),
        ("", ["swap_gate:x"], "--inject: inject[0]: 'x' is no param=value"),
        (
            "expect: {verdict: discrepancy, stage: gemm1, fault: swap}\n",
            [],
            "line 17: expect.fault: 'swap' is not one of swap_gate",
        ),
    ],
    ids=["file", "option", "form", "expected"],
)
def test_an_unknown_fault_is_named_with_its_place(written, more, injects, line):
    found = the_problem(written(more=more), injects=injects, known_faults={"swap_gate"})
    assert found.startswith(line)


def test_fault_names_are_free_where_none_are_known(written):
    assert load_scenario(written(), injects=["anything"]).faults[0].name == "anything"


def test_an_inject_that_is_no_list_is_refused(written):
    assert "inject: 'x' was read (text); must be a valid array" in the_problem(
        written(more="inject: x\n"), injects=["other"]
    )


def test_paths_start_at_the_scenarios_folder(written, tmp_path, monkeypatch):
    (tmp_path / "captured.safetensors").touch()
    path = written(("{modes: [random], seed: 7}", "{modes: [file], path: captured.safetensors}"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load_scenario(path)
    assert loaded.scenario.inputs.path == str(tmp_path / "captured.safetensors")
    assert loaded.scenario.inputs.modes == ("file",)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("{modes: [random], seed: 7}", "{modes: [file], path: none.st}"), "inputs.path"),
        (("  preset: deepseek_v4\n", "  hf_config: none.json\n"), "model.hf_config"),
        (
            ("  preset: deepseek_v4\n", "  preset: deepseek_v4\n  weights: {kind: safetensors, "
             "path: none.st, layer: 3}\n"),
            "model.weights.path",
        ),
    ],
    ids=["inputs", "config", "weights"],
)  # fmt: skip
def test_a_file_that_is_not_there_is_refused(written, change, key):
    found = the_problem(written(change))
    assert f"{key}: no such file: " in found


def test_an_unmodified_config_json_is_read(written, tmp_path):
    config = {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = written(
        ("  preset: deepseek_v4\n", "  hf_config: config.json\n"),
        ("{hidden_size: 256, moe_intermediate_size: 128, n_routed_experts: 8}", "{}"),
    )
    assert load_scenario(path).model.moe_intermediate_size == 128


def test_a_config_json_without_experts_is_refused(written, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    path = written(("  preset: deepseek_v4\n", "  hf_config: config.json\n"))
    assert [p for p in problems(path) if "model.hf_config: no MoE: none of n_routed" in p]


def test_a_rule_that_is_not_enforced_is_a_note(written):
    loaded = load_scenario(written(), overrides=["moe.dispatcher=deepep_ll"])
    assert "hidden_size(256) is none of deepep_ll's 2048, 2560," in loaded.notes[0]


def test_the_error_counts_its_problems(written):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(("world_size: 2", "world_size: 4")))
    assert str(caught.value).splitlines()[0].endswith("small.yaml: 2 problem(s)")
    assert len(caught.value.problems) == 2
