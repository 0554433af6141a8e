"""What is left out on purpose, and why: the one list behind messages and docs/scope.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe.formats import OTHER_COMBINED_TOP_K


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfScope:
    """One thing that no scenario can ask for.

    what   as a reader calls it
    why    one line
    words  values and keys by which somebody might ask for it, as SGLang spells them
    """

    what: str
    why: str
    words: tuple[str, ...] = ()


OUT_OF_SCOPE: Final = (
    OutOfScope(
        what="tf32 hyper-connection prenorm GEMM and the mHC hook",
        why="work on the residual streams around the layer; no expert sees them",
        words=("mhc", "hc_prenorm"),
    ),
    OutOfScope(
        what="pipeline-parallel warm-up",
        why="changes when a kernel is compiled, not what a layer computes",
        words=("pp", "pp_size", "pipeline"),
    ),
    OutOfScope(
        what="hpc_ops",
        why="a runner with kernels and layouts of its own, not DeepGEMM's",
        words=("hpc_ops",),
    ),
    OutOfScope(
        what="runners other than DeepGEMM's",
        why="kernels and layouts of their own; `runner` has one value",
        words=(
            "aiter",
            "cutlass",
            "flashinfer_cutedsl",
            "flashinfer_cutlass",
            "flashinfer_mxfp4",
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "humming",
            "marlin",
            "triton",
            "triton_kernel",
        ),
    ),
    OutOfScope(
        what="megamoe",
        why="dispatch, GEMMs and combine in one kernel: no stage boundary to look at",
        words=("megamoe", "flashinfer_megamoe"),
    ),
    OutOfScope(
        what="mori, pplx",
        why="dispatchers without a DeepGEMM permute",
        words=("mori", "pplx"),
    ),
    OutOfScope(
        what="MUSA, HIP, NPU",
        why="other vendors' layouts and roundings; the rules modelled are NVIDIA's",
        words=("ascend", "ascend_fuseep", "hip", "musa", "npu"),
    ),
    OutOfScope(
        what="LoRA",
        why="another formula inside each expert",
        words=("lora",),
    ),
    OutOfScope(
        what="fp4 x fp4",
        why="the DeepGEMM runner's activations are bf16 or fp8",
        words=("nvfp4", "mxfp4_w4a4"),
    ),
    OutOfScope(
        what="overlap of the down GEMM with combine (SBO)",
        why="the pinned sgl-deep-gemm 0.2.0 has no such arguments",
        words=("sbo", "single_batch_overlap"),
    ),
    OutOfScope(
        what=f"FlashInfer's combine for top-k {', '.join(map(str, OTHER_COMBINED_TOP_K))}",
        why="adds in orders that are not modelled, of some sizes one slot after the other; refused",
    ),
    OutOfScope(
        what="deepep_v2 with `no_combine`",
        why="hands over route rows for a finaliser in the model; its combine rejects them",
        words=("no_combine",),
    ),
)
"""In the order of the documentation."""

NO_SWITCH: Final = (
    OutOfScope(
        what="SGLANG_OPT_USE_FUSED_HASH_TOPK",
        why="fused or not, a hash layer's table gives the same values",
        words=("use_fused_hash_topk",),
    ),
    OutOfScope(
        what="SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK",
        why="another kernel for the same grouped top-k values",
        words=("use_jit_kernel_grouped_topk", "jit_grouped_topk"),
    ),
    OutOfScope(
        what="SGLANG_OPT_MOE_QUANT_ONCE",
        why="shares a quantised input with the shared expert in the triton runner alone",
        words=("moe_quant_once", "quant_once"),
    ),
    OutOfScope(
        what="SGLANG_DEEPEP_V2_NUM_SMS, SGLANG_DEEPEP_LL_COMBINE_SEND_NUM_SMS",
        why="how many multiprocessors communicate: speed, no number",
        words=("deepep_v2_num_sms", "deepep_ll_combine_send_num_sms", "num_sms"),
    ),
    OutOfScope(
        what="SGLANG_DSV4_FP4_DEQUANT",
        why="`moe.recipe: mxfp4_as_fp8` says it",
        words=("dsv4_fp4_dequant", "fp4_dequant"),
    ),
    OutOfScope(
        what="SGLANG_DEEPGEMM_STANDARD_LAYOUT",
        why="`moe.layout` says it",
        words=("deepgemm_standard_layout", "standard_layout"),
    ),
)
"""Environment variables near the layer that have no field under ``moe.switches``."""


def left_out(word: object) -> str | None:
    """Why a value or a key cannot be asked for, or None if nothing is known of it."""
    for rows, kind in ((OUT_OF_SCOPE, "out of scope"), (NO_SWITCH, "no switch")):
        for row in rows:
            if word in tuple(_spellings(row)):
                return f"{word} is {kind} here: {_sentence(row, word)}"
    return None


def _sentence(row: OutOfScope, word: object) -> str:
    """The reason, after what it is about where that is more than the word."""
    return row.why if row.what == word else f"{row.what}: {row.why}"


def _spellings(row: OutOfScope) -> Iterator[str]:
    """A row's words, and the environment variables that it is named by."""
    yield from row.words
    yield from (name for name in row.what.split(", ") if name.startswith("SGLANG_"))
