"""Headers of matrices in every form, and of experts in one tensor."""

import pytest

from moe.recipes import WeightFormat
from scenarios.checkpoint_files import StoredTensor
from scenarios.checkpoint_fit import LayerFit
from scenarios.checkpoint_forms import LAYOUTS
from scenarios.checkpoint_names import LayerNames

UP = "experts.0.up_proj.weight"
SCALE = f"{UP}_scale_inv"
SHAPE = (256, 512)


def fit_over(headers):
    """A fit over tensors of these names, each (shape, dtype)."""
    stored = {
        f"p.{name}": StoredTensor(file="f", name=f"p.{name}", shape=shape, dtype=dtype)
        for name, (shape, dtype) in headers.items()
    }
    names = LayerNames(prefix="p", names={name: f"p.{name}" for name in headers})
    return LayerFit(names, stored)


def found(fit):
    return [(problem.tensor, problem.message) for problem in fit.problems]


@pytest.mark.parametrize(
    ("form", "values", "scale"),
    [
        (WeightFormat.FP8_BLOCK128, ((256, 512), "F8_E4M3"), ((2, 4), "F32")),
        (WeightFormat.FP8_BLOCK128, ((256, 512), "F8_E4M3"), ((2, 4), "BF16")),
        (WeightFormat.FP8_BLOCK128, ((256, 512), "F8_E4M3"), ((2, 4), "F8_E8M0")),
        (WeightFormat.FP8_PER_TENSOR, ((256, 512), "F8_E4M3"), ((), "F32")),
        (WeightFormat.FP8_PER_TENSOR, ((256, 512), "F8_E4M3"), ((1,), "BF16")),
        (WeightFormat.MXFP8, ((256, 512), "F8_E4M3"), ((256, 16), "U8")),
        (WeightFormat.MXFP8, ((256, 512), "F8_E4M3"), ((256, 16), "F8_E8M0")),
        (WeightFormat.MXFP4, ((256, 256), "I8"), ((256, 16), "F8_E8M0")),
        (WeightFormat.MXFP4, ((256, 256), "U8"), ((256, 16), "U8")),
    ],
)
def test_a_matrix_that_fits_comes_with_its_scale(form, values, scale):
    fit = fit_over({UP: values, SCALE: scale})
    matrix = fit.matrix(UP, SHAPE, LAYOUTS[form])
    assert found(fit) == []
    assert (matrix.values.name, matrix.scale.name) == (f"p.{UP}", f"p.{SCALE}")


@pytest.mark.parametrize(
    ("form", "scale", "message"),
    [
        (
            WeightFormat.FP8_BLOCK128,
            ((256, 16), "U8"),
            "[256, 16] U8 was read; wanted [2, 4] F32 or BF16 or F8_E8M0; such a scale is for "
            "moe.recipe mxfp8 or mxfp4_w4a8 or mxfp4_as_fp8",
        ),
        (
            WeightFormat.FP8_BLOCK128,
            ((1,), "F32"),
            "[1] F32 was read; wanted [2, 4] F32 or BF16 or F8_E8M0; such a scale is for "
            "moe.recipe fp8_per_tensor",
        ),
        (
            WeightFormat.FP8_PER_TENSOR,
            ((256, 1), "F32"),
            "[256, 1] F32 was read; wanted [] or [1] F32 or BF16",
        ),
        (
            WeightFormat.MXFP8,
            ((2, 4), "BF16"),
            "[2, 4] BF16 was read; wanted [256, 16] U8 or F8_E8M0; such a scale is for "
            "moe.recipe fp8_block128",
        ),
    ],
    ids=["groups-for-blocks", "one-for-blocks", "rows-for-one", "blocks-for-groups"],
)
def test_a_scale_of_another_form_is_refused_with_the_recipes_that_read_it(form, scale, message):
    fit = fit_over({UP: ((256, 512), "F8_E4M3"), SCALE: scale})
    fit.matrix(UP, SHAPE, LAYOUTS[form])
    assert found(fit) == [(f"p.{SCALE}", message)]


@pytest.mark.parametrize("dtype", ["I8", "U8"])
def test_packed_fp4_under_another_recipe_names_those_that_read_it(dtype):
    fit = fit_over({UP: ((256, 256), dtype), SCALE: ((256, 16), "U8")})
    fit.matrix(UP, SHAPE, LAYOUTS[WeightFormat.FP8_BLOCK128])
    assert found(fit) == [
        (
            f"p.{UP}",
            f"[256, 256] {dtype} was read; wanted [256, 512] F8_E4M3 or BF16; experts in {dtype} "
            "are for moe.recipe mxfp4_w4a8 or mxfp4_as_fp8",
        )
    ]


def test_a_taken_scale_is_not_unread():
    fit = fit_over({UP: ((256, 512), "F16"), SCALE: ((2, 4), "F32")})
    fit.matrix(UP, SHAPE, LAYOUTS[WeightFormat.FP8_BLOCK128])
    assert fit.unread(lambda name: "unread") == []


FUSED = "experts.gate_up_proj"


@pytest.mark.parametrize(
    ("form", "values", "scale"),
    [
        (WeightFormat.FP8_BLOCK128, ((3, 256, 512), "F8_E4M3"), ((3, 2, 4), "F32")),
        (WeightFormat.MXFP8, ((3, 256, 512), "F8_E4M3"), ((3, 256, 16), "U8")),
        (WeightFormat.MXFP4, ((3, 256, 256), "I8"), ((3, 256, 16), "F8_E8M0")),
    ],
)
def test_fused_experts_that_fit_are_one_matrix_each(form, values, scale):
    fit = fit_over({FUSED: values, f"{FUSED}_scale_inv": scale})
    matrices = fit.fused(FUSED, SHAPE, LAYOUTS[form], 3)
    assert found(fit) == []
    assert [matrix.expert for matrix in matrices] == [0, 1, 2]


def test_fused_fp8_experts_with_one_scale_a_matrix_are_refused():
    fit = fit_over({FUSED: ((3, 256, 512), "F8_E4M3"), f"{FUSED}_scale_inv": ((3,), "F32")})
    fit.fused(FUSED, SHAPE, LAYOUTS[WeightFormat.FP8_PER_TENSOR], 3)
    assert found(fit) == [
        (
            f"p.{FUSED}",
            "[3, 256, 512] F8_E4M3 was read; wanted [3, 256, 512] BF16; experts in F8_E4M3 with "
            "one scale a matrix are read from a tensor each",
        )
    ]


@pytest.mark.parametrize("form", [WeightFormat.MXFP8, WeightFormat.MXFP4], ids=str)
def test_columns_that_do_not_split_into_groups_are_refused(form):
    layout = LAYOUTS[form]
    values = ((256, 1000 // layout.packed), layout.values[0])
    fit = fit_over({UP: values, SCALE: ((256, 32), "U8")})
    fit.matrix(UP, (256, 1000), layout)
    assert found(fit) == [(f"p.{UP}", "1000 columns do not split into groups of 32")]


def test_columns_end_inside_a_block():
    fit = fit_over({UP: ((256, 1000), "F8_E4M3"), SCALE: ((2, 8), "F32")})
    fit.matrix(UP, (256, 1000), LAYOUTS[WeightFormat.FP8_BLOCK128])
    assert found(fit) == []


BLOCKED = {
    f"{FUSED}_blocks": ((3, 256, 16, 16), "U8"),
    f"{FUSED}_scales": ((3, 256, 16), "U8"),
}


def test_blocks_of_fp4_that_fit_are_one_matrix_an_expert():
    fit = fit_over(BLOCKED)
    layout = LAYOUTS[WeightFormat.MXFP4]
    matrices = fit.blocked(f"{FUSED}_blocks", SHAPE, layout, 3, interleaved=True)
    assert found(fit) == []
    assert [(matrix.expert, matrix.interleaved) for matrix in matrices] == [
        (0, True),
        (1, True),
        (2, True),
    ]


@pytest.mark.parametrize("groups", [31, 32])
def test_blocks_of_fp4_whose_columns_do_not_split_are_refused(groups):
    blocks = {
        f"{FUSED}_blocks": ((3, 256, groups, 16), "U8"),
        f"{FUSED}_scales": ((3, 256, groups), "U8"),
    }
    fit = fit_over(blocks)
    fit.blocked(f"{FUSED}_blocks", (256, 1000), LAYOUTS[WeightFormat.MXFP4], 3, interleaved=True)
    assert found(fit)[-1] == (f"p.{FUSED}_blocks", "1000 columns do not split into groups of 32")


def test_wrong_blocks_and_missing_scales_are_found_at_once():
    fit = fit_over({f"{FUSED}_blocks": ((3, 256, 256), "U8")})
    fit.blocked(f"{FUSED}_blocks", SHAPE, LAYOUTS[WeightFormat.MXFP4], 3, interleaved=True)
    assert found(fit) == [
        (f"p.{FUSED}_blocks", "[3, 256, 256] U8 was read; wanted [3, 256, 16, 16] U8"),
        (f"p.{FUSED}_scales", "missing; wanted [3, 256, 16] U8"),
    ]


def test_blocks_of_fp4_under_another_recipe_name_those_that_read_them():
    fit = fit_over(BLOCKED)
    layout = LAYOUTS[WeightFormat.MXFP8]
    fit.blocked(f"{FUSED}_blocks", SHAPE, layout, 3, interleaved=True)
    assert found(fit) == [
        (
            f"p.{FUSED}_blocks",
            "experts in U8 are for moe.recipe mxfp4_w4a8 or mxfp4_as_fp8",
        )
    ]
