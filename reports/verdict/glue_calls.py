"""Which collectives the glue owes, with their bytes: from the plan alone, never from a trace."""

from collections.abc import Mapping, Sequence
from typing import Final

from moe.formats import Stage
from reports.verdict.formats.view import DueCall
from reports.verdict.layer import JudgedLayer
from topology.sync_calls import Carried, collective_calls

GROUP: Final = 128
_ID_BYTES: Final = 8
_BF16_BYTES: Final = 2
_FP32_BYTES: Final = 4


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
        Carried.HIDDEN_STATES: hidden_size * _BF16_BYTES,
        Carried.INPUT_IDS: _ID_BYTES,
        Carried.WIRE: hidden_size,
        Carried.WIRE_SCALE: hidden_size // GROUP * _FP32_BYTES,
    }
