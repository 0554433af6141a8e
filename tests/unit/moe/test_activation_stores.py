"""How often each layout stores an activation in bf16: the pipeline's table and the golden's."""

import pytest

from moe.activation import ActivationStores
from moe.activation import stores_of as pipeline_stores_of
from moe.formats import ActivationKind, GatedActivation, GemmLayout, ScaleFormat
from moe.golden import Stores
from moe.golden import stores_of as golden_stores_of

OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702)
OAI_LIMITED = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=7.0)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
COLUMNS = [
    (layout, scale_format)
    for layout in (GemmLayout.CONTIG, GemmLayout.MASKED)
    for scale_format in (ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0)
]
# Stores of segments, then of slabs, each without scales, with fp32 ones, with UE8M0 ones.
TABLE = {
    "silu": (GatedActivation(), "111 122"),
    "silu, limited": (GatedActivation(limit=10.0), "111 100"),
    "silu, kept in fp32": (GatedActivation(keeps_fp32=True), "100 100"),
    "silu, limited and kept": (GatedActivation(limit=10.0, keeps_fp32=True), "100 100"),
    "oai_swiglu": (OAI, "111 100"),
    "oai_swiglu, limited": (OAI_LIMITED, "111 100"),
    "situ": (SITU, "110 100"),
}
PIPELINE = {"0": ActivationStores.NONE, "1": ActivationStores.ONCE, "2": ActivationStores.TWICE}
GOLDEN = {"0": Stores.NOTHING, "1": Stores.PRODUCT, "2": Stores.SILU_AND_PRODUCT}

EVERY_PLACE = pytest.mark.parametrize(
    ("rule", "layout", "scale_format", "count"),
    [
        pytest.param(rule, *place, count, id="-".join((name, *place)))
        for name, (rule, counts) in TABLE.items()
        for place, count in zip(COLUMNS, counts.replace(" ", ""), strict=True)
    ],
)


@EVERY_PLACE
def test_the_pipeline_stores_as_often_as_the_kernel(rule, layout, scale_format, count):
    assert pipeline_stores_of(rule, layout, scale_format) is PIPELINE[count]


@EVERY_PLACE
def test_the_golden_stores_as_often_as_the_kernel(rule, layout, scale_format, count):
    assert golden_stores_of(rule, layout, scale_format) is GOLDEN[count]
