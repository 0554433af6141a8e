"""The table of conversions between a dispatch format and a runner's layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from moe.formats import DispatchFormat, RunnerBackend
from moe.permute import deepep_normal, deepep_v2, flashinfer, low_latency, standard
from moe.permute.context import PermuteContext
from moe.stages import CombineInput, Gemm2Output, PrePermuteOutput

__all__ = ["PERMUTES", "PermuteContext", "PermutePair", "UnsupportedPermuteError", "permute_pair"]


class UnsupportedPermuteError(ValueError):
    """No conversion between this dispatch format and this runner."""


@dataclass(frozen=True, slots=True)
class PermutePair:
    """Both directions; a half-registered conversion cannot exist.

    pre   dispatch output of the format -> grouped rows and the way back
    post  (expert outputs, the way back) -> what combine takes
    """

    pre: Callable[[Any, PermuteContext], PrePermuteOutput]
    post: Callable[[Gemm2Output, Any, PermuteContext], CombineInput]


_LOW_LATENCY: Final = PermutePair(low_latency.pre_permute, low_latency.post_permute)

PERMUTES: Final[Mapping[tuple[DispatchFormat, RunnerBackend], PermutePair]] = MappingProxyType(
    {
        (DispatchFormat.STANDARD, RunnerBackend.DEEP_GEMM): PermutePair(
            standard.pre_permute, standard.post_permute
        ),
        (DispatchFormat.FLASHINFER, RunnerBackend.DEEP_GEMM): PermutePair(
            flashinfer.pre_permute, flashinfer.post_permute
        ),
        (DispatchFormat.DEEPEP_NORMAL, RunnerBackend.DEEP_GEMM): PermutePair(
            deepep_normal.pre_permute, deepep_normal.post_permute
        ),
        (DispatchFormat.DEEPEP_LL, RunnerBackend.DEEP_GEMM): _LOW_LATENCY,
        (DispatchFormat.MOONCAKE, RunnerBackend.DEEP_GEMM): _LOW_LATENCY,
        (DispatchFormat.NIXL, RunnerBackend.DEEP_GEMM): _LOW_LATENCY,
        (DispatchFormat.DEEPEP_V2, RunnerBackend.DEEP_GEMM): PermutePair(
            deepep_v2.pre_permute, deepep_v2.post_permute
        ),
    }
)


def permute_pair(dispatch_format: DispatchFormat, runner: RunnerBackend) -> PermutePair:
    """The registered pair.

    Raises:
        UnsupportedPermuteError: there is none; the message lists those there are.
    """
    try:
        return PERMUTES[dispatch_format, runner]
    except KeyError:
        known = ", ".join(f"{fmt}+{backend}" for fmt, backend in PERMUTES)
        raise UnsupportedPermuteError(
            f"no permute for {dispatch_format}+{runner}; registered: {known}"
        ) from None
