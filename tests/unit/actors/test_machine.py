"""Device and GEMM follow from the scenario and from what the machine has; nothing falls back."""

from pathlib import Path

import pytest

from actors import machine
from actors.machine import Gpus, device_of, gemm_of, kernels_of, lacking, transport_of
from actors.topologies import Topology, with_topology
from moe.formats import Platform
from scenarios.loader import load_scenario
from scenarios.sections import AttentionParallel, MoeParallel

TWO_H200 = Gpus(count=2, platform=Platform.SM90, name="NVIDIA H200")
NARROW = ("moe.recipe=bf16", "model.overrides.hidden_size=200")
NONE = Gpus(count=0, platform=None, name="none")
GPU_SCENARIOS = sorted(Path("scenarios/gpu").glob("*.yaml"))


@pytest.fixture
def has(monkeypatch):
    def give(gpus, deep_gemm=True):
        monkeypatch.setattr(machine, "gpus", lambda: gpus)
        monkeypatch.setattr(machine, "find_spec", lambda name: object() if deep_gemm else None)

    return give


def loaded(*sets):
    return load_scenario("scenarios/smoke/ep2_dp.yaml", overrides=("platform=sm90", *sets))


def scenario(*sets):
    return loaded(*sets).scenario


@pytest.mark.parametrize(
    ("gpus", "sets", "device"),
    [
        (TWO_H200, (), "cuda"),
        (NONE, (), "cpu"),
        (TWO_H200, ("run.runtime=loopback",), "cpu"),
        (TWO_H200, ("run.runtime=loopback", "run.device=cuda"), "cuda"),
        (TWO_H200, ("platform=sm100",), "cpu"),
        (Gpus(count=1, platform=Platform.SM90, name="NVIDIA H200"), (), "cpu"),
        (TWO_H200, ("run.device=cpu",), "cpu"),
    ],
    ids=["enough", "none", "loopback", "asked", "another platform", "too few", "cpu asked"],
)
def test_auto_is_a_gpu_only_where_each_rank_gets_one_of_the_platform(has, gpus, sets, device):
    has(gpus)
    assert device_of(scenario(*sets)).name == device


@pytest.mark.parametrize(
    ("sets", "deep_gemm", "name", "reason"),
    [
        ((), True, "deep_gemm", "SGLang's own"),
        ((), False, "torch", "deep_gemm is not installed"),
        (("run.device=cpu",), True, "torch", "no GPU takes part"),
        (("run.device=cuda", "platform=sm100"), True, "torch", "this GPU is sm90"),
        (NARROW, True, "torch", "ep_gather wants hidden_size(200)"),
    ],
    ids=["there", "not installed", "cpu", "another platform", "a size that it refuses"],
)
def test_auto_multiplies_with_deep_gemm_where_it_can(has, sets, deep_gemm, name, reason):
    has(TWO_H200, deep_gemm)
    chosen = gemm_of(loaded(*sets))
    assert chosen.name == name
    assert reason in chosen.reason


@pytest.mark.parametrize(
    ("gpus", "deep_gemm", "sets", "reason"),
    [
        (NONE, True, ("run.device=cuda",), "run.device cuda needs 2 GPU(s), torch sees 0 here"),
        (NONE, True, ("run.device=cuda", "run.runtime=loopback"), "needs 1 GPU(s)"),
        (TWO_H200, False, ("run.backends.gemm=deep_gemm",), "deep_gemm is not installed"),
        (TWO_H200, True, ("run.backends.gemm=deep_gemm", "platform=sm100"), "needs run.device"),
        (TWO_H200, True, ("run.backends.transport=gloo",), "cuda moves bytes with nccl"),
        (NONE, True, ("run.backends.transport=nccl",), "cpu moves bytes with gloo"),
    ],
    ids=["no GPU", "none for loopback", "no library", "on a CPU", "gloo", "nccl"],
)
def test_what_is_named_and_missing_is_said(has, gpus, deep_gemm, sets, reason):
    has(gpus, deep_gemm)
    (said,) = lacking(loaded(*sets))
    assert reason in said


@pytest.mark.parametrize(
    ("gpus", "triton", "sets", "name", "reason"),
    [
        (TWO_H200, True, (), "triton", "kernels, as SGLang has"),
        (TWO_H200, False, (), "torch", "triton is not installed"),
        (TWO_H200, True, ("model.preset=gpt_oss",), "torch", "its activation is silu"),
        (NONE, True, (), "torch", "no GPU takes part"),
        (NONE, True, ("run.backends.kernels=triton",), "triton", "named in the scenario"),
    ],
    ids=["there", "not installed", "another activation", "cpu", "asked"],
)
def test_auto_takes_triton_on_a_gpu_where_it_has_the_kernels(has, gpus, triton, sets, name, reason):
    has(gpus, triton)
    chosen = kernels_of(loaded(*sets))
    assert chosen.name == name
    assert reason in chosen.reason


KERNELS = "run.backends.kernels=triton"
LOOPBACK = (KERNELS, "run.runtime=loopback")


@pytest.mark.parametrize(
    ("gpus", "triton", "sets", "reason"),
    [
        (NONE, False, LOOPBACK, "triton is not installed"),
        (NONE, True, LOOPBACK, "or TRITON_INTERPRET=1 for its interpreter on a CPU"),
        (NONE, True, (KERNELS,), "its interpreter takes run.runtime loopback"),
        (TWO_H200, True, (KERNELS, "run.device=cpu"), "it needs run.device cuda"),
    ],
    ids=["no library", "no GPU", "no GPU for Ray", "on a CPU"],
)
def test_kernels_that_cannot_run_are_unsupported(has, monkeypatch, gpus, triton, sets, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    has(gpus, triton)
    (said,) = lacking(loaded(*sets))
    assert said.startswith("run.backends.kernels triton: ")
    assert reason in said


def test_the_interpreter_stands_in_for_a_gpu_under_loopback(has, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    has(NONE)
    assert lacking(loaded(*LOOPBACK)) == []


def test_a_machine_that_has_everything_lacks_nothing(has):
    has(TWO_H200)
    sets = "run.device=cuda", "run.backends={gemm: deep_gemm, transport: nccl}"
    assert lacking(loaded(*sets)) == []


@pytest.mark.parametrize(
    ("sets", "transport"),
    [((), "nccl"), (("run.device=cpu",), "gloo"), (("run.runtime=loopback",), "loopback")],
)
def test_bytes_are_moved_by_what_serves_the_device(has, sets, transport):
    has(TWO_H200)
    assert transport_of(scenario(*sets)) == transport


def test_another_topology_computes_with_the_same_hardware(has):
    has(TWO_H200)
    given = loaded()
    topology = Topology(
        name="ep1", attention=AttentionParallel(dp=1), moe=MoeParallel(ep=1), beside=()
    )
    there = with_topology(given, topology)
    assert there.scenario.run.runtime == "loopback"
    assert device_of(there.scenario).name == device_of(given.scenario).name == "cuda"
    assert gemm_of(there).name == gemm_of(given).name == "deep_gemm"


@pytest.mark.parametrize("path", GPU_SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_for_gpus_says_how_many_it_lacks(has, path):
    has(NONE, deep_gemm=False)
    loaded = load_scenario(path)
    one = loaded.scenario
    count = 1 if one.run.runtime == "loopback" else one.parallel.world_size
    assert lacking(loaded) == [
        f"run.device cuda needs {count} GPU(s), torch sees 0 here",
        "run.backends.gemm deep_gemm: deep_gemm is not installed",
    ]


@pytest.mark.parametrize("path", GPU_SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_for_gpus_lacks_nothing_where_it_has_them(has, path):
    loaded = load_scenario(path)
    one = loaded.scenario
    has(Gpus(count=one.parallel.world_size, platform=Platform.SM90, name="NVIDIA H200"))
    assert lacking(loaded) == []


def test_a_machine_without_gpus_has_no_facts_of_them(has):
    has(NONE)
    machine.gpu_facts.cache_clear()
    assert machine.gpu_facts() == {}
    machine.gpu_facts.cache_clear()
