"""Every form of every dispatcher: how it is made on one rank, and how often a token arrives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import MappingProxyType

from torch import Tensor

from moe.dispatch import Dispatcher
from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.deepep_v2 import DeepEpV2Dispatcher, DeepEpV2Messages
from moe.dispatch.deepep_v2_expanded import DeepEpV2ExpandedDispatcher
from moe.dispatch.flashinfer import FlashInferDispatcher, FlashInferGatherDispatcher
from moe.dispatch.low_latency import LowLatencyDispatcher
from moe.dispatch.standard import StandardDispatcher
from moe.dispatch.token_exchange import TokenExchange
from moe.formats import DispatchFormat, GemmLayout, ScaleFormat
from moe.quant.fp8 import QuantizedRows, quantize_groups
from topology.collectives import Collectives
from topology.mesh import Group
from topology.splits import align

ALIGNMENT = 128


class Arrival(Enum):
    """How often a token arrives at a rank."""

    ALWAYS = auto()
    BY_RANK = auto()
    """Once, if it has an expert there."""
    BY_ROUTE = auto()
    """Once for each of its experts there."""


def quantizer(scale_format: ScaleFormat) -> Callable[[Tensor], QuantizedRows] | None:
    if scale_format is ScaleFormat.NONE:
        return None
    return partial(quantize_groups, scale_format=scale_format)


@dataclass(frozen=True)
class Site:
    """One rank, and what a dispatcher is told there.

    counts    tokens of each rank
    capacity  rows that a rank may send; None: just enough for the counts
    """

    verbs: Collectives
    num_local: int
    top_k: int
    counts: tuple[int, ...]
    scale_format: ScaleFormat = ScaleFormat.NONE
    seed: int = 0
    capacity: int | None = None

    @property
    def group(self) -> Group:
        return tuple(range(self.verbs.world_size))

    @property
    def rows(self) -> int:
        """Capacity in whole fours: slabs are a multiple of that."""
        return self.capacity or align(max(1, *self.counts), 4)

    @property
    def exchange(self) -> TokenExchange:
        return TokenExchange(
            collectives=self.verbs,
            group=self.group,
            num_local_experts=self.num_local,
            arrival_seed=self.seed + self.verbs.rank,
        )

    @property
    def messages(self) -> DeepEpV2Messages:
        quantize = quantizer(self.scale_format)
        return DeepEpV2Messages(exchange=self.exchange, quantize=quantize, capacity=self.rows)


def _standard(site: Site) -> Dispatcher:
    return StandardDispatcher(num_local_experts=site.num_local, ep_rank=site.verbs.rank)


def _gathered(site: Site) -> Dispatcher:
    return FlashInferGatherDispatcher(
        collectives=site.verbs,
        group=site.group,
        num_local_experts=site.num_local,
        ep_rank=site.verbs.rank,
        counts=site.counts,
    )


def _one_sided(site: Site) -> Dispatcher:
    return FlashInferDispatcher(
        collectives=site.verbs,
        group=site.group,
        num_local_experts=site.num_local,
        rows_per_rank=max(site.counts),
        buffers=MessageBuffers(1),
        message_seed=site.seed + site.verbs.rank,
    )


def _deepep_normal(site: Site) -> Dispatcher:
    return DeepEpNormalDispatcher(
        exchange=site.exchange, expert_alignment=ALIGNMENT, quantize=quantizer(site.scale_format)
    )


def _low_latency(site: Site) -> Dispatcher:
    return LowLatencyDispatcher(
        collectives=site.verbs,
        group=site.group,
        num_local_experts=site.num_local,
        capacity=site.rows,
        wire_format=site.scale_format,
        buffers=MessageBuffers(2),
        arrival_seed=site.seed + site.verbs.rank,
    )


def _deepep_v2(site: Site) -> Dispatcher:
    return DeepEpV2Dispatcher(messages=site.messages, expert_alignment=ALIGNMENT)


def _expanded(site: Site) -> Dispatcher:
    return DeepEpV2ExpandedDispatcher(
        messages=site.messages, expert_alignment=ALIGNMENT, top_k=site.top_k
    )


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way through dispatch and permute.

    roundings           bf16 stores from an identity expert to its token: a rank's sum, and the
                        sum of the ranks
    quantises_received  the wire is bf16 and pre-permute quantises; else the wire is quantised
    sends_dummies       a rank without tokens sends a zero row to the first K experts of all
    """

    dispatch_format: DispatchFormat
    dispatcher: Callable[[Site], Dispatcher]
    layout: GemmLayout
    arrival: Arrival
    roundings: int = 2
    quantises_received: bool = False
    caps_slabs: bool = False
    wide_segments: bool = False
    sends_dummies: bool = False


_CONTIG, _MASKED = GemmLayout.CONTIG, GemmLayout.MASKED
_IN_PLACE = partial(
    Form,
    dispatch_format=DispatchFormat.STANDARD,
    dispatcher=_standard,
    arrival=Arrival.ALWAYS,
    quantises_received=True,
)
_GATHERED = partial(
    Form,
    dispatch_format=DispatchFormat.FLASHINFER,
    dispatcher=_gathered,
    arrival=Arrival.ALWAYS,
    quantises_received=True,
)
_ONE_SIDED = partial(
    Form,
    dispatch_format=DispatchFormat.FLASHINFER,
    dispatcher=_one_sided,
    arrival=Arrival.BY_RANK,
    quantises_received=True,
)
_EXPANDED = partial(
    Form,
    dispatch_format=DispatchFormat.DEEPEP_V2,
    dispatcher=_expanded,
    arrival=Arrival.BY_ROUTE,
)

FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "standard_compact": _IN_PLACE(layout=_CONTIG),
        "standard_wide": _IN_PLACE(layout=_CONTIG, wide_segments=True),
        "standard_masked": _IN_PLACE(layout=_MASKED),
        "standard_capped": _IN_PLACE(layout=_MASKED, caps_slabs=True),
        "flashinfer_extend": _GATHERED(layout=_CONTIG),
        "flashinfer_extend_masked": _GATHERED(layout=_MASKED),
        "flashinfer_decode": _ONE_SIDED(layout=_CONTIG),
        "flashinfer_decode_masked": _ONE_SIDED(layout=_MASKED),
        "deepep_normal": Form(
            dispatch_format=DispatchFormat.DEEPEP_NORMAL,
            dispatcher=_deepep_normal,
            layout=_CONTIG,
            arrival=Arrival.BY_RANK,
        ),
        "deepep_ll": Form(
            dispatch_format=DispatchFormat.DEEPEP_LL,
            dispatcher=_low_latency,
            layout=_MASKED,
            arrival=Arrival.BY_ROUTE,
            roundings=1,
        ),
        "deepep_v2": Form(
            dispatch_format=DispatchFormat.DEEPEP_V2,
            dispatcher=_deepep_v2,
            layout=_CONTIG,
            arrival=Arrival.BY_RANK,
            sends_dummies=True,
        ),
        "deepep_v2_expanded": _EXPANDED(layout=_MASKED, roundings=3),
        "deepep_v2_expanded_compact": _EXPANDED(layout=_CONTIG, roundings=4),
    }
)
