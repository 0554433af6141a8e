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
from moe.formats import DispatchFormat, GemmLayout, Phase, QuantRecipe, ScaleFormat, Stage
from moe.trace import RankTrace
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import load_scenario
from tests.unit.pages import ROOT, section, table_rows
from tests.unit.trace_forms import CASES, FORMS, RECIPES, Form

SMOKE = ROOT / "scenarios" / "smoke" / "ep2_dp.yaml"
SETTINGS = (
    "run.runtime=loopback",
    "model.overrides.moe_intermediate_size=256",
    "batch.tokens=[7, 4]",
    "allow_unsupported=true",
)
FP4_VALUES = {"weights/experts.w13.values", "weights/experts.w2.values"}


@dataclass(frozen=True)
class Traced:
    """A small run of a form: what rank 0 left."""

    form: Form
    run: ResolvedScenario
    trace: RankTrace
    sizes: dict[str, object]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def traced(request):
    of_form, recipe = request.param
    form = FORMS[of_form]
    loaded = load_scenario(SMOKE, overrides=[*SETTINGS, *RECIPES[recipe], *form.settings])
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
            yield name, *stored(stage, traced, name, shape, dtype)
    for of_stage, name, shape, dtype, _ in table_rows(
        section("trace.md", "## Under other topologies and recipes")
    )[1:]:
        if of_stage == stage and f"{stage}/{name}" in besides(traced):
            yield name, *stored(stage, traced, name, shape, dtype)


def besides(traced: Traced) -> set[str]:
    """Rows of the last table that hold in a run."""
    found = set(traced.form.besides)
    if is_fp32_activation(traced):
        found.add("activation/activation")
    return found | FP4_VALUES if traced.run.plan.recipe is QuantRecipe.MXFP4_W4A8 else found


def is_fp32_activation(traced: Traced) -> bool:
    plan = traced.run.plan
    is_masked = plan.gemm_layout is GemmLayout.MASKED
    return is_masked and plan.scale_format is not ScaleFormat.NONE


def stored(
    stage: Stage, traced: Traced, name: str, shape: str, dtype: str
) -> tuple[list[int], str]:
    """A row's shape in numbers, and its dtype, under the run's layout and recipe."""
    plan = traced.run.plan
    shape, dtype = (variant(text, plan.scale_format) for text in (shape, dtype))
    if plan.gemm_layout is GemmLayout.MASKED:
        shape = shape.replace("[M, ", "[L, S, ")
    if not has_scales(stage, traced) and dtype == "e4m3":
        dtype = "bfloat16"
    return size_of(shape, traced.sizes | {"g": group_of(stage, traced, name)}), dtype


def group_of(stage: Stage, traced: Traced, name: str) -> int:
    """g, as the page tells it."""
    plan = traced.run.plan
    if plan.recipe is QuantRecipe.MXFP4_W4A8:
        return 32 if name.startswith("experts.") else 128
    on_the_wire = stage in (Stage.DISPATCH, Stage.PRE_PERMUTE) and not plan.bf16_wire
    quantised_there = plan.dispatch_format is DispatchFormat.DEEPEP_NORMAL or (
        plan.dispatch_format.is_low_latency
    )
    is_small = plan.recipe is QuantRecipe.MXFP8 and not (on_the_wire and quantised_there)
    return 32 if is_small else 128


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


PADDED_ROWS = (
    ("dispatch", "hidden_states"),
    ("pre_permute", "rows.hidden_states"),
    ("gemm2", "output"),
    ("post_permute", "partial"),
)


def test_padded_experts_have_their_own_sizes_up_to_post_permute():
    path = ROOT / "scenarios" / "recipes" / "gpt_oss_padded.yaml"
    loaded = load_scenario(path, overrides=["run.runtime=loopback"])
    run = resolve(loaded)
    with LoopbackRanks(run.plan) as world:
        rows = deal(batch_of(loaded, "random"), run.plan.sync)
        trace = world.forward(rows, timeout_s=60)[0].trace
    assert trace["weights"]["experts.w13.values"].shape[1:] == (2 * 512, 512 // 2)
    widths = {stage: trace[stage][name].shape[-1] for stage, name in PADDED_ROWS}
    assert widths == {stage: 512 for stage, _ in PADDED_ROWS}
    assert trace["combine"]["routed"].shape[-1] == 480
