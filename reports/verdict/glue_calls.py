"""Which collectives the glue owes, with their bytes: from the plan alone, never from a trace."""

from collections.abc import Mapping, Sequence

from moe.formats import Stage
from reports.verdict.decode import BLOCK
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, DueCall
from reports.verdict.layer import JudgedLayer
from topology.sync_calls import Carried, collective_calls


def glue_calls_due(layer: JudgedLayer, rank: int) -> Sequence[DueCall]:
    """Collectives of glue_in, tail and glue_out of one rank, in order."""
    row_bytes = _row_bytes(layer.hidden_size)
    calls = collective_calls(
        layer.sync,
        layer.layout,
        rank,
        input_ids=layer.routing.hashed,
        fp8_wire=layer.gathers_fp8,
    )
    return [
        DueCall(
            stage=Stage(call.stage),
            op=call.op,
            group=call.group,
            payload_bytes=call.rows * row_bytes[call.carries],
        )
        for call in calls
    ]


def _row_bytes(hidden_size: int) -> Mapping[Carried, int]:
    return {
        Carried.HIDDEN_STATES: hidden_size * BF16_BYTES,
        Carried.INPUT_IDS: ID_BYTES,
        Carried.WIRE: hidden_size,
        Carried.WIRE_SCALE: hidden_size // BLOCK * FP32_BYTES,
    }
