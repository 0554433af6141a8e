"""What ``run.py`` refuses: exit code 2, one clear message on stderr, nothing run or written."""

import pytest

pytestmark = pytest.mark.e2e

SMOKE = "scenarios/smoke/ep2_dp.yaml"
LOOPBACK = ("--runtime", "loopback")


def test_equal_names_are_refused_before_anything_runs(called, three, tmp_path, written):
    written(three, name="again.yaml")
    code, out, err = called(three, *LOOPBACK, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "2 scenarios are named 'ep2_dp'" in err
    assert not (tmp_path / "out").exists()


def test_nothing_runs_if_one_of_several_files_is_bad(called, three, tmp_path, written):
    written(three, ("tokens: [5, 3]", "tokens: [5]"), name="bad.yaml")
    code, out, err = called(three, *LOOPBACK, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "bad.yaml" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(called, tmp_path):
    (tmp_path / "taken").write_text("")
    code, out, err = called(SMOKE, *LOOPBACK, "--out", tmp_path / "taken")
    assert (code, out) == (2, "")
    assert "taken" in err


DENSE = '{"hidden_size": 256, "num_hidden_layers": 2}'
BAD = {
    "no such file": ((), "no/such.yaml", "no such file"),
    "no YAML": ((("model:", "model: ["),), None, "case.yaml"),
    "repeated key": ((("platform: sm100", "platform: sm100\nplatform: sm90"),), None, "platform"),
    "1e-3": ((("seed: 7}", "seed: 7}\nrun: {timeout_s: 1e-3}"),), None, "1e-3"),
    "token list too short": ((("tokens: [5, 3]", "tokens: [5]"),), None, "batch.tokens"),
    "world size": ((("world_size: 2", "world_size: 3"),), None, "world_size"),
    "experts do not divide": ((("n_routed_experts: 8", "n_routed_experts: 7"),), None, "7"),
    "no MoE in config.json": (
        (("preset: deepseek_v4", "hf_config: dense.json"),),
        None,
        "hf_config",
    ),
    "unknown fault": (
        (("platform: sm100", "platform: sm100\ninject: [tokens_swaped]"),),
        None,
        "did you mean 'tokens_swapped'",
    ),
    "fault parameter": (
        (("platform: sm100", "platform: sm100\ninject: ['tokens_swapped:rwo=1']"),),
        None,
        "did you mean 'row'",
    ),
    "unknown key": ((("platform:", "platfrom:"),), None, "did you mean 'platform'"),
    "negative seed": ((("seed: 7", "seed: -7"),), None, "inputs.seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_scenario_is_one_clear_message_and_exit_2(called, tmp_path, case, written):
    changes, path, said = BAD[case]
    (tmp_path / "dense.json").write_text(DENSE)
    path = path or written(tmp_path, *changes)
    code, out, err = called(path, *LOOPBACK, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--inject", "tokens_swaped"), "did you mean 'tokens_swapped'"),
        (("--set", "batch.tokns=[1, 2]"), "did you mean"),
        (("--set", "nonsense"), "nonsense"),
        (("--nope",), "--nope"),
        (("--timeout", "soon"), "--timeout"),
    ],
    ids=["fault", "key", "no key", "option", "number"],
)
def test_bad_usage_is_one_clear_message_and_exit_2(called, tmp_path, arguments, said):
    code, out, err = called(SMOKE, *LOOPBACK, *arguments, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "out").exists()
