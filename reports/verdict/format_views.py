"""The table of dispatch formats that can be judged: one row and one file a format."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from moe.formats import DispatchFormat
from reports.verdict.formats.deepep_normal import DeepEpNormalView
from reports.verdict.formats.standard import StandardView
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer

FORMAT_VIEWS: Final[Mapping[DispatchFormat, Callable[[JudgedLayer], FormatView]]] = (
    MappingProxyType(
        {
            DispatchFormat.STANDARD: lambda layer: StandardView(),
            DispatchFormat.DEEPEP_NORMAL: lambda layer: DeepEpNormalView(),
        }
    )
)
"""Format -> its view of a layer; some formats take several forms."""


def view_of(layer: JudgedLayer) -> FormatView:
    """What the layer's dispatch format promises."""
    return FORMAT_VIEWS[layer.dispatch_format](layer)
