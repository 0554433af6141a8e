"""The page about recipes has the tables of the code: groups, load paths, checkpoints, stores."""

import re

import pytest
import torch

from moe.activation import ActivationStores, stores_of
from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    Platform,
    QuantRecipe,
    ScaleFormat,
)
from moe.platforms import PLATFORMS
from moe.quant.ue8m0 import pack_ue8m0, scale_from_exponent
from moe.recipes import RECIPES, Recipe, WeightFormat
from scenarios.weight_forms import checkpoint_form
from tests.unit.pages import section, table_rows

SILU = GatedActivation()


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the tables below a heading, with the head of the first."""
    return table_rows(section("recipes.md", f"## {heading}"))


def table(heading: str) -> dict[str, list[str]]:
    """First cell of each row below the head -> the others."""
    return {first: cells for first, *cells in rows_of(heading)[1:]}


def columns(group: int | None) -> str:
    return str(group or "none")


def block(recipe: Recipe) -> str:
    return "none" if recipe.weight_block is None else "{} x {}".format(*recipe.weight_block)


def scales(recipe: Recipe) -> str:
    if recipe.activation_group is None:
        return "none"
    return "powers of two" if recipe.needs_ue8m0 else "the platform's"


def test_every_recipe_has_its_row():
    assert table("The table") == {
        name: [
            row.checkpoint,
            block(row),
            columns(row.activation_group),
            columns(row.wire_group),
            scales(row),
            row.shared,
        ]
        for name, row in RECIPES.items()
    }


def per_row(group: int | None) -> str:
    return f"(1, {group})"


def operands(recipe: Recipe) -> list[str]:
    """recipe_a of GEMM1 behind two wires and of GEMM2, and recipe_b of scales that are packed."""
    wire, elsewhere = (
        recipe.input_group(dispatcher, bf16_wire=False)
        for dispatcher in (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_V2)
    )
    middle = recipe.middle_group(SILU, GemmLayout.CONTIG)
    assert recipe.weight_block is not None
    return [per_row(group) for group in (wire, elsewhere, middle, recipe.weight_block[1])]


def test_gemms_are_told_the_groups_of_the_table():
    quantised = {name: row for name, row in RECIPES.items() if name is not QuantRecipe.BF16}
    assert table("GEMMs") == {name: operands(row) for name, row in quantised.items()}


def test_a_checkpoint_loads_on_each_platform_as_the_page_says():
    listed = rows_of("Loading")
    assert listed[0] == ["recipe", *Platform]
    assert table("Loading") == {
        name: [loading(row, PLATFORMS[platform].scale_format(name)) for platform in Platform]
        for name, row in RECIPES.items()
    }


def loading(recipe: Recipe, scale_format: ScaleFormat) -> str:
    if recipe.needs_ue8m0 and scale_format is not ScaleFormat.UE8M0:
        return "refused"
    return str(recipe.load_path(scale_format))


def stored(tensor: torch.Tensor | None) -> tuple[list[int], str] | None:
    if tensor is None:
        return None
    dtype = str(tensor.dtype).removeprefix("torch.").replace("float8_e4m3fn", "e4m3")
    return list(tensor.shape), dtype


def documented(shape: str, dtype: str) -> tuple[list[int], str] | None:
    """``[L, N/128, K/128]`` in numbers."""
    if shape == "none":
        return None
    sizes = {"L": 2, "P": 2, "N": 256, "K": 384}
    terms = re.findall(r"([A-Z])(?:/(\d+))?", shape)
    return [sizes[letter] // int(divisor or 1) for letter, divisor in terms], dtype


@pytest.mark.parametrize("form", WeightFormat)
def test_a_checkpoint_has_the_tensors_of_the_page(form):
    values, dtype, scale, scale_dtype, _ = table("Checkpoints")[form]
    matrix = checkpoint_form(torch.ones(2, 256, 384, dtype=torch.bfloat16), form, parts=2)
    found = stored(matrix.values), stored(matrix.scale)
    assert found == (documented(values, dtype), documented(scale, scale_dtype))


def worked_example() -> dict[str, list[str]]:
    return {first: cells for first, *cells in rows_of("Where scales lie") if len(cells) == 6}


def test_the_bytes_of_the_example_are_its_scales():
    example = worked_example()
    written = [float(scale.replace("^", "**").partition("**")[2]) for scale in example["scale"]]
    exponents = torch.tensor([int(byte, 16) for byte in example["byte"]], dtype=torch.uint8)
    assert scale_from_exponent(exponents).tolist() == [2.0**power for power in written]


def test_the_words_of_the_example_lie_where_it_says():
    example = worked_example()
    exponents = torch.zeros(5, 6, dtype=torch.uint8)
    exponents[0] = torch.tensor([int(byte, 16) for byte in example["byte"]], dtype=torch.uint8)
    packed = pack_ue8m0(exponents)
    words = [f"0x{word & 0xFFFFFFFF:08x}" for word in packed[0].tolist()]
    assert [text for text in example["word's value"] if text] == words
    memory = bytes(packed.untyped_storage())
    places = [int(place) for place in example["at byte of the tensor"]]
    assert [f"0x{memory[place]:02x}" for place in places] == example["byte"]
    assert [int(word) for word in example["word"]] == [group // 4 for group in range(6)]


OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=7.0)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
RULES = {
    "silu": SILU,
    "silu with a limit": GatedActivation(limit=10.0),
    "silu kept in fp32": GatedActivation(keeps_fp32=True),
    "oai_swiglu": OAI,
    "situ": SITU,
}
COUNTS = {ActivationStores.NONE: "0", ActivationStores.ONCE: "1", ActivationStores.TWICE: "2"}


def test_every_activation_is_stored_as_often_as_the_page_says():
    listed = {first: cells for first, *cells in rows_of("Activations") if len(cells) == 6}
    assert listed.pop("activation")
    assert listed == {
        name: [
            COUNTS[stores_of(rule, layout, scale_format)]
            for layout in (GemmLayout.CONTIG, GemmLayout.MASKED)
            for scale_format in (ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0)
        ]
        for name, rule in RULES.items()
    }


def test_situ_in_slabs_is_the_exception_that_the_page_names():
    row = RECIPES[QuantRecipe.MXFP8]
    assert row.middle_group(SITU, GemmLayout.MASKED) == 128
    said = " ".join(section("recipes.md", "## GEMMs").split())
    assert "situ's kernel of slabs quantises in 128s, so GEMM2 has (1, 128) there" in said


def test_every_deviation_has_a_finding_of_its_own():
    links = re.findall(
        r"\]\(\.\./scenarios/findings/(\w+)\.yaml\)",
        section("recipes.md", "## Where SGLang 0.5.21 does otherwise"),
    )
    assert links == [
        "bf16_experts_without_clamp",
        "compact_without_alpha",
        "situ_scales_rounded_up_late",
        "sm120_low_latency_scales_rounded_up",
    ]
