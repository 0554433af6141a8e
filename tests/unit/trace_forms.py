"""Forms of dispatchers with the tables that the page about traces has for them, and recipes."""

from dataclasses import dataclass

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
    "mxfp8": ("platform=sm100", "moe.recipe=mxfp8"),
    "mxfp4": ("platform=sm100", "moe.recipe=mxfp4_w4a8"),
}
WITH_GROUPS_OF_32 = (
    ("standard", "mxfp8"),
    ("flashinfer decode", "mxfp8"),
    ("deepep_normal", "mxfp8"),
    ("deepep_normal bf16 wire", "mxfp8"),
    ("deepep_ll", "mxfp8"),
    ("deepep_v2", "mxfp8"),
    ("deepep_v2 expanded", "mxfp8"),
    ("standard masked", "mxfp4"),
    ("deepep_normal", "mxfp4"),
)
CASES = (
    *((form, recipe) for form in FORMS for recipe in ("fp32 scales", "ue8m0 scales", "bf16")),
    *WITH_GROUPS_OF_32,
)
