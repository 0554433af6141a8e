"""How many rows the grouped layouts take, as integers: no tensor, no torch."""

from typing import Final

from topology.splits import align

SLAB_STEP: Final = 256
SCALES_A_UNIT: Final = 4


def ceil_div(count: int, size: int) -> int:
    """Number of ``size``-wide pieces that hold ``count``."""
    return -(-count // size)


def compact_row_bound(num_routes: int, num_local_experts: int, alignment: int) -> int:
    """Rows that aligned segments of ``num_routes`` rows fill at most, however they are routed.

    Each expert with a row wastes at most ``alignment - 1``; the worst case gives a row to as many
    experts as there are.

    Args:
        num_routes: slots of all tokens, dropped ones and those of other ranks included.
        num_local_experts: L.
        alignment: rows.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_get_compact_all_tokens.
    """
    with_a_row = min(num_routes, num_local_experts)
    return alignment * (with_a_row + (num_routes - with_a_row) // alignment)


def wide_row_bound(num_routes: int, num_local_experts: int, alignment: int) -> int:
    """Rows of a buffer for aligned segments: the routes end to end, and one block more an expert.

    Args:
        num_routes: slots of all tokens, dropped ones and those of other ranks included.
        num_local_experts: L.
        alignment: rows.

    Source: SGLang 0.5.21, deep_gemm_sm120.maybe_pre_permute.
    """
    return align(num_routes, alignment) + alignment * num_local_experts


def rows_expected(num_slots: int, ranks: int, num_experts: int) -> int:
    """Rows of an expert if every rank had as many routes as this one, and they were spread evenly.

    Args:
        num_slots: top-k slots of this rank's tokens.
        ranks: P.
        num_experts: expert slots of all ranks.

    Source: SGLang 0.5.21, token_dispatcher/deepep.py::_DeepEPDispatcherImplLowLatency.
    """
    return (num_slots * ranks + num_experts) // num_experts


def low_latency_slab_problem(ranks: int, capacity: int) -> str | None:
    """Why slabs of so many rows cannot be: scales lie along them in units of 16 bytes.

    Args:
        ranks: P.
        capacity: C, rows that a rank may send in one dispatch.

    Source: DeepEP, csrc/deep_ep.cpp::low_latency_dispatch (rows of a slab % 4 == 0).
    """
    rows = ranks * capacity
    if rows % SCALES_A_UNIT == 0:
        return None
    return (
        f"{ranks} ranks of {capacity} rows make slabs of {rows}; set "
        "moe.switches.max_dispatch_tokens_per_rank so that the product is a multiple of "
        f"{SCALES_A_UNIT}"
    )


def slab_height(num_tokens: int) -> int:
    """Rows of each expert's slab: more than ``num_tokens``, in steps of 256, so 512 for 256.

    Source: SGLang 0.5.21, ep_moe/kernels.py::moe_ep_deepgemm_preprocess.
    """
    return (num_tokens // SLAB_STEP + 1) * SLAB_STEP


def capped_slab_height(num_tokens: int, fullest: int) -> int:
    """As ``slab_height``, but no higher than the fullest expert needs, in steps of 256.

    Args:
        num_tokens: as there.
        fullest: rows of the expert that has most.

    Source: SGLang 0.5.21, the same with SGLANG_OPT_DG_MASKED_M_CAP.
    """
    return min(slab_height(num_tokens), max(align(fullest, SLAB_STEP), SLAB_STEP))
