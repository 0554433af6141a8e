"""Which of deepep_v2's three forms a layer takes."""

from moe.formats import GemmLayout
from reports.verdict.formats.deepep_v2 import DeepEpV2View
from reports.verdict.formats.deepep_v2_expanded import (
    DeepEpV2ExpandedContigView,
    DeepEpV2ExpandedView,
)
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer


def deepep_v2_view(layer: JudgedLayer) -> FormatView:
    """Rows of tokens, or of routes: in slabs, or where they are."""
    if not layer.expanded:
        return DeepEpV2View()
    in_slabs = layer.gemm_layout is GemmLayout.MASKED
    return DeepEpV2ExpandedView() if in_slabs else DeepEpV2ExpandedContigView()
