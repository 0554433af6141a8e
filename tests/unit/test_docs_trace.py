"""The page about traces has every tensor of every dispatcher, with its shape and dtype."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import pytest
import torch
from torch import Tensor

from actors.resolve import ResolvedScenario, resolve
from actors.world import LoopbackRanks
from moe.formats import GemmLayout, Phase, ScaleFormat, Stage
from moe.trace import RankTrace
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import load_scenario
from tests.unit.pages import ROOT, section, table_rows

SMOKE = ROOT / "scenarios" / "smoke" / "ep2_dp.yaml"
SETTINGS = (
    "run.runtime=loopback",
    "model.overrides.moe_intermediate_size=256",
    "batch.tokens=[7, 4]",
    "allow_unsupported=true",
)
LOW_LATENCY = "`deepep_ll`, `mooncake`, `nixl`"
EXPANDED = "`deepep_v2`, expanded"
TOKENS = "rows of tokens"


@dataclass(frozen=True)
class Form:
    """A dispatcher's form: how to get it, and what its tables are called.

    besides  rows of the table about other topologies that take part, as ``stage/name``
    lacks    rows of the other tables that do not
    """

    settings: tuple[str, ...]
    dispatch: str
    way_back: str
    post_permute: str = TOKENS
    besides: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


BF16_WIRE = ("moe.switches.deepep_bf16_dispatch=true",)
GROUPED_HERE, EXCHANGED = "`standard`, `flashinfer`", "`deepep_normal`, `deepep_v2` not expanded"
DECODE, COMPACT, MASKED = "batch.phase=decode", "moe.layout=compact", "moe.layout=masked"


def low_latency(*settings: str) -> Form:
    return Form((DECODE, *settings), LOW_LATENCY, LOW_LATENCY, LOW_LATENCY)


def standard(*settings: str, besides: tuple[str, ...] = ("tail/summand",)) -> Form:
    return Form(("moe.dispatcher=standard", *settings), "`standard`", GROUPED_HERE, TOKENS, besides)


def flashinfer(*settings: str, phase: str) -> Form:
    return Form(("moe.dispatcher=flashinfer", *settings), f"`flashinfer` in {phase}", GROUPED_HERE)


def expanded(*settings: str) -> Form:
    return Form(("moe.dispatcher=deepep_v2", DECODE, *settings), EXPANDED, EXPANDED, EXPANDED)


FORMS = {
    "standard": standard(COMPACT),
    "standard masked": standard(MASKED),
    "standard, tail reduces": standard(
        COMPACT,
        "parallel.attention={dp: 1, tp: 2}",
        "batch.tokens=[9]",
        besides=("tail/summand", "tail/reduced"),
    ),
    "hash layer": Form(
        ("model.layer=hash_moe",),
        "`deepep_normal`",
        EXCHANGED,
        besides=("weights/tid2eid", "glue_in/input_ids"),
        lacks=("weights/correction_bias",),
    ),
    "flashinfer extend": flashinfer(COMPACT, phase="prefill"),
    "flashinfer extend masked": flashinfer(MASKED, phase="prefill"),
    "flashinfer decode": flashinfer(DECODE, COMPACT, phase="decode"),
    "flashinfer decode masked": flashinfer(DECODE, MASKED, phase="decode"),
    "deepep_normal": Form((), "`deepep_normal`", EXCHANGED),
    "deepep_normal bf16 wire": Form(BF16_WIRE, "`deepep_normal`", EXCHANGED),
    "deepep_ll": low_latency("moe.dispatcher=deepep_ll"),
    "deepep_ll bf16 wire": low_latency("moe.dispatcher=deepep_ll", *BF16_WIRE),
    "mooncake": low_latency("moe.dispatcher=mooncake"),
    "nixl": low_latency("moe.dispatcher=nixl"),
    "deepep_v2": Form(("moe.dispatcher=deepep_v2",), "`deepep_v2`, not expanded", EXCHANGED),
    "deepep_v2 expanded": expanded(),
    "deepep_v2 expanded compact": expanded(COMPACT),
}
RECIPES = {
    "fp32 scales": ("platform=sm90", "moe.recipe=fp8_block128"),
    "ue8m0 scales": ("platform=sm100", "moe.recipe=fp8_block128"),
    "bf16": ("platform=sm100", "moe.recipe=bf16"),
}


@dataclass(frozen=True)
class Traced:
    """A small run of a form: what rank 0 left."""

    form: Form
    run: ResolvedScenario
    trace: RankTrace
    sizes: dict[str, object]


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(scope="module", params=RECIPES)
def traced(form, request):
    loaded = load_scenario(SMOKE, overrides=[*SETTINGS, *RECIPES[request.param], *form.settings])
    run = resolve(loaded)
    with LoopbackRanks(run.plan) as world:
        rows = deal(batch_of(loaded, "random"), run.plan.sync)
        traces = [report.trace for report in world.forward(rows, timeout_s=60)]
    sizes = sizes_of(run, traces) | {"vocab": loaded.model.vocab_size}
    return Traced(form, run, traces[0], sizes)


def sizes_of(run: ResolvedScenario, traces: list[RankTrace]) -> dict[str, object]:
    """Letter -> size on rank 0; what is received and sent follows from the routes."""
    layer, plan, top_k = run.judged, run.plan, run.judged.top_k
    num_local, ranks = layer.slots_per_rank, plan.layout.ep
    own = traces[0][Stage.DISPATCH]["physical_ids"]
    everywhere = torch.cat([trace[Stage.DISPATCH]["physical_ids"] for trace in traces])
    if not layer.is_all_to_all:
        everywhere = own
    is_here = (everywhere >= 0) & (everywhere < num_local)
    counts = [len(rows) for rows in plan.sync.layer]
    rows = traces[0][Stage.PRE_PERMUTE]["rows.hidden_states"].shape
    return {
        "O": len(plan.sync.entry[0]),
        "T": counts[0],
        "R": num_received(run, counts, int(is_here.any(dim=1).sum())),
        "N": sum(len({slot // num_local for slot in ids if slot >= 0}) for ids in own.tolist()),
        "C": ceil((ranks * (plan.capacity or 0) * min(top_k, num_local) + 127 * num_local) / 128)
        * 128,
        "M": rows[0],
        "S": rows[-2],
        "V": int(is_here.sum()),
        "H": layer.hidden_size,
        "I": layer.intermediate_size // layer.expert_shard(0).count,
        "J": layer.shared_intermediate_size // layer.shared_shard(0).count,
        "E": layer.num_experts,
        "L": num_local,
        "K": top_k,
        "P": ranks,
        "ceil": ceil,
    }


def num_received(run: ResolvedScenario, counts: list[int], with_an_expert: int) -> int:
    """Rows of tokens at rank 0: all, a slot of equal height from each rank, or those with one."""
    layer = run.judged
    if not layer.is_all_to_all:
        return counts[0]
    if layer.dispatch_format != "flashinfer":
        return with_an_expert
    return max(counts) * len(counts) if layer.phase is Phase.DECODE else sum(counts)


def headings(stage: Stage, traced: Traced) -> list[str]:
    """Of the tables that a stage of a form has."""
    match stage:
        case Stage.DISPATCH:
            return [f"#### dispatch: {traced.form.dispatch}"]
        case Stage.PRE_PERMUTE:
            of_layout = f"#### pre_permute: {traced.run.plan.gemm_layout} layout"
            way_back = f"#### pre_permute: way back of {traced.form.way_back}"
            return ["### `pre_permute`", of_layout, way_back]
        case Stage.POST_PERMUTE:
            return [f"#### post_permute: {traced.form.post_permute}"]
        case _:
            return [f"### `{stage}`"]


def documented(stage: Stage, traced: Traced) -> Iterator[tuple[str, list[int], str]]:
    """(name, shape, dtype) of every tensor that the page gives a stage."""
    for heading in headings(stage, traced):
        for name, shape, dtype, *_ in table_rows(section("trace.md", heading))[1:]:
            yield name, *stored(stage, traced, shape, dtype)
    besides = set(traced.form.besides)
    if is_fp32_activation(traced):
        besides.add("activation/activation")
    for of_stage, name, shape, dtype, _ in table_rows(
        section("trace.md", "## Under other topologies")
    )[1:]:
        if of_stage == stage and f"{stage}/{name}" in besides:
            yield name, *stored(stage, traced, shape, dtype)


def is_fp32_activation(traced: Traced) -> bool:
    plan = traced.run.plan
    is_masked = plan.gemm_layout is GemmLayout.MASKED
    return is_masked and plan.scale_format is not ScaleFormat.NONE


def stored(stage: Stage, traced: Traced, shape: str, dtype: str) -> tuple[list[int], str]:
    """A row's shape in numbers, and its dtype, under the run's layout and recipe."""
    plan = traced.run.plan
    shape, dtype = (variant(text, plan.scale_format) for text in (shape, dtype))
    if plan.gemm_layout is GemmLayout.MASKED:
        shape = shape.replace("[M, ", "[L, S, ")
    if not has_scales(stage, traced) and dtype == "e4m3":
        dtype = "bfloat16"
    return size_of(shape, traced.sizes), dtype


def has_scales(stage: Stage, traced: Traced) -> bool:
    plan = traced.run.plan
    on_bf16_wire = stage is Stage.DISPATCH and plan.bf16_wire
    return plan.scale_format is not ScaleFormat.NONE and not on_bf16_wire


def variant(text: str, scale_format: ScaleFormat) -> str:
    """Of ``with fp32 scales or with UE8M0 scales`` the one that is stored."""
    variants = text.split(" or ")
    return variants[scale_format is ScaleFormat.UE8M0] if len(variants) == 2 else text


def size_of(shape: str, sizes: dict[str, object]) -> list[int]:
    """``[L, 2I, ceil(H/128/4)]`` as numbers."""
    return [int(size) for size in eval(re.sub(r"(\d)([A-Z])", r"\1*\2", shape), dict(sizes))]


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").replace("float8_e4m3fn", "e4m3")


def test_the_page_has_every_tensor_with_its_shape_and_dtype(traced):
    expected = {
        f"{stage}/{name}": (shape, dtype)
        for stage in Stage
        for name, shape, dtype in documented(stage, traced)
        if has_scales(stage, traced) or not name.endswith("scale")
    }
    found = {
        f"{stage}/{name}": (list(tensor.shape), dtype_of(tensor))
        for stage in Stage
        for name, tensor in traced.trace[stage].items()
    }
    assert found == {
        name: stored for name, stored in expected.items() if name not in traced.form.lacks
    }


def test_every_table_of_a_dispatcher_is_held_against_a_run():
    page = (ROOT / "docs" / "trace.md").read_text()
    tables = set(
        re.findall(r"^#### (dispatch|pre_permute: way back of|post_permute):? (.*)$", page, re.M)
    )
    forms = FORMS.values()
    assert tables == {
        *(("dispatch", form.dispatch) for form in forms),
        *(("pre_permute: way back of", form.way_back) for form in forms),
        *(("post_permute", form.post_permute) for form in forms),
    }


def test_the_python_of_the_page_runs():
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "trace.md").read_text(), flags=re.DOTALL
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert names["rows"].shape == (len(names["plan"].entry[1]), 256)
