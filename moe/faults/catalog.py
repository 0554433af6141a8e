"""The table of named faults: one row a way to be wrong, with the public bug it stands for.

Rows stand behind the functions they name, in the order of the pipeline.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from moe.faults.activations import ACTIVATION_FAULTS
from moe.faults.buffers import BUFFER_FAULTS
from moe.faults.collectives import COLLECTIVE_FAULTS
from moe.faults.dispatching import DISPATCH_FAULTS
from moe.faults.exchanges import EXCHANGE_FAULTS
from moe.faults.flashinfer import FLASHINFER_FAULTS
from moe.faults.glue import GLUE_FAULTS
from moe.faults.grouped import GROUPED_FAULTS
from moe.faults.index_maps import INDEX_FAULTS
from moe.faults.judging import CHECKER_FAULTS
from moe.faults.kinds import Fault
from moe.faults.misreading import MISREADING_FAULTS
from moe.faults.mistaken import MISTAKES
from moe.faults.orders import ORDER_FAULTS
from moe.faults.preparation import PREPARATION_FAULTS
from moe.faults.process import PROCESS_FAULTS
from moe.faults.router_slips import ROUTER_SLIP_FAULTS
from moe.faults.routes_back import ROUTE_BACK_FAULTS
from moe.faults.routing import ROUTING_FAULTS
from moe.faults.scale_forms import SCALE_FORM_FAULTS
from moe.faults.scale_layouts import SCALE_LAYOUT_FAULTS
from moe.faults.scales import SCALE_FAULTS
from moe.faults.tail import TAIL_FAULTS
from moe.faults.tiles import TILE_FAULTS
from moe.faults.weights import WEIGHT_FAULTS

_IN_ORDER: Final = sorted(
    (
        *WEIGHT_FAULTS,
        *MISREADING_FAULTS,
        *PREPARATION_FAULTS,
        *GLUE_FAULTS,
        *ROUTING_FAULTS,
        *ROUTER_SLIP_FAULTS,
        *ORDER_FAULTS,
        *DISPATCH_FAULTS,
        *FLASHINFER_FAULTS,
        *BUFFER_FAULTS,
        *INDEX_FAULTS,
        *GROUPED_FAULTS,
        *TILE_FAULTS,
        *ACTIVATION_FAULTS,
        *SCALE_FAULTS,
        *SCALE_LAYOUT_FAULTS,
        *SCALE_FORM_FAULTS,
        *ROUTE_BACK_FAULTS,
        *TAIL_FAULTS,
        *COLLECTIVE_FAULTS,
        *EXCHANGE_FAULTS,
    ),
    key=lambda fault: fault.stage.position,
)

FAULTS: Final[Mapping[str, Fault]] = MappingProxyType(
    {
        fault.name: replace(fault, mistakes=MISTAKES.get(fault.name, frozenset()))
        for fault in (*_IN_ORDER, *PROCESS_FAULTS, *CHECKER_FAULTS)
    }
)
