"""The table of dispatch formats that can be judged: one row and one file a format."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moe.formats import DispatchFormat
from reports.verdict.formats.deepep_normal import DeepEpNormalView
from reports.verdict.formats.standard import StandardView
from reports.verdict.formats.view import FormatView

FORMAT_VIEWS: Final[Mapping[DispatchFormat, FormatView]] = MappingProxyType(
    {
        DispatchFormat.STANDARD: StandardView(),
        DispatchFormat.DEEPEP_NORMAL: DeepEpNormalView(),
    }
)
