"""Every ``auto`` becomes a named choice with a reason that fits the scenario."""

import pytest

from actors.backends import backends_of
from actors.resolve import resolve

STANDARD = ("moe.dispatcher=standard", "moe.shared_experts=replicated")
DECODE = "batch.phase=decode"
V2, LL, FLASHINFER = (f"moe.dispatcher={name}" for name in ("deepep_v2", "deepep_ll", "flashinfer"))
CAPACITY = "moe.switches.max_dispatch_tokens_per_rank"


def test_every_backend_is_named_with_version_and_reason(load):
    backends = resolve(load()).backends
    names = {axis: backends[axis].name for axis in ("gemm", "transport", "kernels")}
    assert names == {"gemm": "torch", "transport": "loopback", "kernels": "torch"}
    assert all(choice.version for choice in backends.values())
    assert all(choice.reason.startswith("auto: ") for choice in backends.values())


def test_a_backend_that_was_asked_for_says_so(load):
    choice = resolve(load("run.backends.gemm=torch")).backends["gemm"]
    assert (choice.name, choice.reason) == ("torch", "named in the scenario")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((), "auto: compact: deepep_normal hands over expert segments end to end"),
        (
            (*STANDARD, "model.overrides.swiglu_limit=null"),
            # 4 slabs of 256 rows of 256 + 2 scale bytes and 512 bytes of GEMM1's output.
            "auto: masked: its slabs peak at 0.8 MiB, within 45.0 GiB "
            "(25 % of an empty B200 180 GB)",
        ),
        (
            STANDARD,
            "auto: compact: the clamping masked kernel wants I % 512 == 0, I is 128 "
            "(SGLang logs it once)",
        ),
        ((*STANDARD, "moe.layout=masked"), "named in the scenario"),
    ],
    ids=["all to all", "memory", "clamp", "asked for"],
)
def test_the_layout_says_why(load, settings, reason):
    assert resolve(load(*settings)).backends["layout"].reason == reason


@pytest.mark.parametrize("dispatcher", ["deepep_normal", "deepep_ll", "deepep_v2", "mooncake"])
def test_the_runner_is_the_one_that_sglang_takes_by_itself(load, dispatcher):
    choice = resolve(load(f"moe.dispatcher={dispatcher}")).backends["runner"]
    assert choice.name == "deep_gemm"
    assert choice.reason == f"auto: SGLang's own auto takes it beside {dispatcher}"


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        (STANDARD, "(triton, or flashinfer_mxfp4 for fp4 experts)"),
        ((*STANDARD, "moe.recipe=bf16"), "(triton)"),
        (("moe.dispatcher=flashinfer",), "(cutlass, cutedsl or trtllm)"),
        (("moe.dispatcher=nixl", "moe.recipe=bf16"), "(triton)"),
    ],
    ids=["standard", "standard bf16", "flashinfer", "nixl bf16"],
)
def test_where_sglang_takes_another_runner_the_reason_says_how_to_get_this_one(
    load, settings, other
):
    choice = resolve(load(*settings)).backends["runner"]
    assert choice.name == "deep_gemm"
    assert f"SGLang's auto would take another here {other}: " in choice.reason
    assert choice.reason.endswith("serve with --moe-runner-backend deep_gemm to get what is judged")


def test_ray_moves_bytes_with_gloo(load):
    assert resolve(load("run.runtime=ray")).backends["transport"].name == "gloo"


@pytest.mark.parametrize(
    ("settings", "transport"),
    [((), "deepep_normal is emulated over it"), (STANDARD, "standard exchanges nothing")],
    ids=["deepep_normal", "standard"],
)
def test_the_transport_says_what_goes_over_it(load, settings, transport):
    assert transport in backends_of(load(*settings))["transport"].reason


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ((), "false", "auto: only deepep_v2 expands"),
        ((V2,), "false", "auto: deepep_v2 expands in decode alone, this is extend"),
        ((V2, DECODE), "true", "auto: deepep_v2 expands in decode alone, this is decode"),
        ((V2, DECODE, "moe.expanded=true"), "true", "named in the scenario"),
    ],
    ids=str,
)
def test_expansion_is_resolved(load, settings, name, reason):
    choice = backends_of(load(*settings))["expanded"]
    assert (choice.name, choice.reason) == (name, reason)


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ((), "none", "auto: deepep_normal has no limit in extend"),
        ((LL, DECODE), "128", "auto: rows a rank may send, deepep_ll's default"),
        ((LL, DECODE, f"{CAPACITY}=64"), "64", "named in the scenario"),
        ((FLASHINFER, DECODE), "4096", "auto: rows a rank may send, flashinfer's default"),
        ((FLASHINFER, f"{CAPACITY}=64"), "none", "auto: flashinfer has no limit in extend"),
    ],
    ids=str,
)
def test_capacity_is_stated_with_where_it_comes_from(load, settings, name, reason):
    choice = backends_of(load(*settings))["capacity"]
    assert (choice.name, choice.reason) == (name, reason)


ONE_GROUP = ("parallel.attention.dp=1", "parallel.attention.tp=2", "batch.tokens=[8]")
TENSOR_SPLIT = "the layer works on a chunk of own rows, one for each attention-TP rank"
CHUNKS = "combine adds the ranks' partial results; behind the tail attention-TP ranks gather their"
OWNERS = "combine adds the ranks' partial results; rows are with their owners then"
CUT = "the tail all-reduces the ranks' partial results, then each rank cuts out its slot"


@pytest.mark.parametrize(
    ("axis", "settings", "name", "reason"),
    [
        ("gather", (), "none", "the layer works on own rows"),
        ("gather", ONE_GROUP, "tensor_split", TENSOR_SPLIT),
        ("gather", STANDARD, "all_gather_v", "the layer works on slots of 5, 3 rows"),
        ("reduce", (), "none", OWNERS),
        ("reduce", ONE_GROUP, "all_gather", CHUNKS),
        ("reduce", STANDARD, "reduce_scatter_v", "the scatter that returns the rows sums them"),
        ("reduce", (*STANDARD, *ONE_GROUP), "all_reduce", "the tail all-reduces"),
        (
            "reduce",
            (*STANDARD, "moe.recipe=bf16", "parallel.moe.ep=1", "parallel.moe.tp=2"),
            "dp_scatter",
            CUT,
        ),
        ("padding", ONE_GROUP, "none", "one attention-DP group has nothing to pad to"),
        ("padding", (), "sum_len", "each slot is as long as its own group, in prefill"),
        (
            "padding",
            (DECODE, "batch.tokens=[9, 0]"),
            "max_len",
            "every slot is as long as the longest, in decode with at least half of such slots",
        ),
        (
            "padding",
            (V2, "moe.switches.deepep_v2_force_max_len=true"),
            "max_len",
            "every slot is as long as the longest, by switch deepep_v2_force_max_len",
        ),
    ],
    ids=str,
)
def test_the_glue_says_why(load, axis, settings, name, reason):
    choice = backends_of(load(*settings))[axis]
    assert choice.name == name
    assert choice.reason.startswith(f"auto: {reason}")


def test_sparse_decode_pads_no_slot_and_says_why(load):
    world = ("parallel.world_size=4", "parallel.attention.dp=4", "parallel.moe.ep=4")
    choice = backends_of(load(*world, DECODE, "batch.tokens=[9, 0, 1, 0]"))["padding"]
    assert choice.name == "sum_len"
    assert choice.reason.endswith("in decode with less than half of equal slots filled")
