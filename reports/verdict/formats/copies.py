"""What was quantised once and sent several times is the same bits everywhere."""

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden import Quantized, quantize_groups
from reports.verdict.decode import codes_f64
from reports.verdict.stage_checks import StageChecks, check_moved


def check_copies(
    checks: StageChecks,
    values: Tensor,
    scale: Tensor,
    x: Tensor,
    source: Tensor,
    amax_floor: float,
) -> None:
    """Copies of one row are equal; where they are not, those of the majority are right.

    fp32 scales leave a quantiser some room, so each copy alone may be legal. The majority is the
    largest group of equal copies; of groups that are equally large, the one nearest to the golden's
    row.

    Args:
        checks: of the N copies.
        values: [N, H] e4m3.
        scale: [N, G] fp32.
        x: [T, H] bf16 rows that were quantised.
        source: [N] which of them a copy is of.
        amax_floor: least magnitude that a group is scaled for.
    """
    if values.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        return  # a broken layout, and reported as one
    group_size = checks.layer.scales_of(checks.stage, "hidden_states").group_size
    golden = quantize_groups(
        x.to(torch.float64), ScaleFormat.FP32, group_size, amax_floor=amax_floor
    )
    cells = values.shape[1] + scale.shape[1]
    score = _equal_copies(values, scale, source) * (cells + 1) + _alike(
        values, scale, golden, source
    )
    best = torch.full((len(x),), -1).scatter_reduce(0, source, score, "amax")
    majority = (score == best[source]).nonzero()[:, 0]
    right = torch.full((len(x),), len(source)).scatter_reduce(0, source[majority], majority, "amin")
    sent = {"hidden_states": values, "hidden_states_scale": scale}
    check_moved(checks, "hidden_states", sent, sent, right[source])


def _equal_copies(values: Tensor, scale: Tensor, source: Tensor) -> Tensor:
    """[N] int64: how many copies of the same row have a copy's bits, itself included.

    Bits are compared by a random linear form of them: a collision would count rows as equal that
    are not.
    """
    words = torch.cat([values.view(torch.int32), scale.view(torch.int32)], dim=1).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    form = torch.randint(1 << 62, (words.shape[1],), generator=generator, device="cpu")
    form = form.to(words.device)
    copies = torch.stack([source, (words * form).sum(1)], dim=1)
    _, group, size = torch.unique(copies, dim=0, return_inverse=True, return_counts=True)
    sizes: Tensor = size[group]
    return sizes


def _alike(values: Tensor, scale: Tensor, golden: Quantized, source: Tensor) -> Tensor:
    """[N] int64: codes and scales of a copy that are the golden's."""
    same_codes = codes_f64(values) == golden.codes[source]
    same_scales = scale.to(torch.float64) == golden.scale[source]
    return torch.cat([same_codes, same_scales], dim=1).sum(1)
