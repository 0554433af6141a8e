"""The table of dispatch formats that can be judged: one row and one file a format."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from moe.formats import DispatchFormat
from reports.verdict.formats.deepep_normal import deepep_normal_view
from reports.verdict.formats.deepep_v2 import deepep_v2_view
from reports.verdict.formats.flashinfer import flashinfer_view
from reports.verdict.formats.low_latency import low_latency_view
from reports.verdict.formats.standard import StandardView
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer

FORMAT_VIEWS: Final[Mapping[DispatchFormat, Callable[[JudgedLayer], FormatView]]] = (
    MappingProxyType(
        {
            DispatchFormat.STANDARD: lambda layer: StandardView(),
            DispatchFormat.FLASHINFER: flashinfer_view,
            DispatchFormat.DEEPEP_NORMAL: deepep_normal_view,
            DispatchFormat.DEEPEP_V2: deepep_v2_view,
            DispatchFormat.DEEPEP_LL: low_latency_view,
            DispatchFormat.MOONCAKE: low_latency_view,
            DispatchFormat.NIXL: low_latency_view,
        }
    )
)
"""Format -> its view of a layer; some formats take several forms."""


def view_of(layer: JudgedLayer) -> FormatView:
    """What the layer's dispatch format promises."""
    return FORMAT_VIEWS[layer.dispatch_format](layer)
