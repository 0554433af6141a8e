"""Codes of a quantiser that went wrong: rounded late, of a group without its least magnitude."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF
from moe.golden import E4M3_MAX
from moe.mistakes import Mistake
from reports.verdict.band import reciprocal_noise
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.explanation import Explanation
from reports.verdict.rules import code_limits


def codes_wrong(case: Case) -> Iterator[Explanation]:
    """What the codes are those of."""
    if case.is_scale or case.evidence.quantiser is None:
        return
    yield from _late(case)
    yield from _no_floor(case)


def _late(case: Case) -> Iterator[Explanation]:
    """Codes of the largest magnitude itself, under a scale that was rounded up."""
    note = case.evidence.quantiser
    assert note is not None
    scaled, scale = note.want.scaled[case.here], note.want.scale[case.here]
    grouped = scaled.view(*scale.shape, scaled.shape[-1] // scale.shape[-1])
    amax = grouped.abs().amax(-1, keepdim=True)
    exact = (grouped * E4M3_MAX / amax).nan_to_num(0.0).view_as(scaled)
    noise = reciprocal_noise(case.layer.arithmetic) + 2 * FP32_ROUNDOFF
    low, high = code_limits(exact, noise)
    is_late = ((case.got >= low) & (case.got <= high)).all(1)
    times = (E4M3_MAX / amax)[is_late]
    size = f"values {float(times.mean()):.4g} times too large on average" if len(times) else ""
    size += f", {float(times.max()):.4g} at most" if len(times) else ""
    yield Explanation(
        mistake=Mistake.SCALE_LATE,
        words=f"scale rounded up to a power of two after its exact value made the codes: {size}",
        explains=is_late,
    )


def _no_floor(case: Case) -> Iterator[Explanation]:
    """Rows of zeros that became 0 / 0."""
    is_blank: Tensor = (case.want == 0).all(1) & case.got.isnan().all(1)
    largest = torch.full_like(case.got, E4M3_MAX)
    is_blank |= (case.want == 0).all(1) & (case.got.abs() == largest).all(1)
    yield Explanation(
        mistake=Mistake.SCALE_FLOOR,
        words=f"{int(is_blank.sum())} rows of zeros quantised without a least magnitude: their "
        "codes are those of 0 / 0",
        explains=is_blank,
    )
