"""Judges codes whose unquantised values nobody stored: a kernel that computes and quantises."""

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF
from moe.formats import ScaleFormat
from moe.golden import quantize_groups, round_e4m3
from reports.verdict.band import reciprocal_noise
from reports.verdict.compared import BAND
from reports.verdict.decode import codes_f64, scales_f64
from reports.verdict.rules import QUANTISER
from reports.verdict.stage_checks import StageChecks

FP32_LAST_PLACE = 2 * FP32_ROUNDOFF


def check_fused(
    checks: StageChecks,
    tensor: str,
    values: Tensor,
    scale: Tensor | None,
    want: Tensor,
    band: Tensor,
) -> None:
    """Scales are those of a largest magnitude within the band, codes those of values within it.

    Args:
        checks: of the stage's rows.
        tensor: name of the codes in the trace; the scales are ``<name>_scale``.
        values: [R, C] e4m3; bf16 where the recipe has no scales.
        scale: its scales, or None.
        want: [R, C] float64, the golden's values in front of the quantiser.
        band: [R, C] float64, their largest error.
    """
    scale_format, group_size = checks.layer.scales_of(checks.stage, tensor)
    ledger, stage, rows = checks.ledger, checks.stage, checks.rows
    if scale_format is ScaleFormat.NONE or scale is None:
        got = values.to(torch.float64)
        ledger.cells(BAND, stage, tensor, rows, got=got, want=want, band=band)
        return
    least, most = (
        quantize_groups(size, scale_format, group_size).scale
        for size in ((want.abs() - band).clamp_min(0), want.abs() + band)
    )
    got_scale = scales_f64(scale, most.shape[1])
    noise, places = 0.0, 0.0
    if scale_format is ScaleFormat.FP32:
        noise, places = reciprocal_noise(checks.layer.arithmetic) + FP32_ROUNDOFF, FP32_LAST_PLACE
    fits_scale = (got_scale >= least * (1 - places)) & (got_scale <= most * (1 + places))
    spread = got_scale.repeat_interleave(want.shape[1] // got_scale.shape[1], dim=1)
    low, high = ((want + sign * band) / spread for sign in (-1, 1))
    low, high = (edge + sign * noise * edge.abs() for sign, edge in ((-1, low), (1, high)))
    got = codes_f64(values)
    fits = (got >= round_e4m3(low)) & (got <= round_e4m3(high))
    overflows = band.isinf() | ~want.isfinite()  # may have become anything
    group_overflows = overflows.view(
        *got_scale.shape, overflows.shape[-1] // got_scale.shape[-1]
    ).any(-1)
    for name, cells, due, legal in (
        (f"{tensor}_scale", got_scale, most, fits_scale | group_overflows),
        (tensor, got, round_e4m3(want / spread), fits | overflows),
    ):
        ledger.steps(QUANTISER, stage, name, rows, got=cells, want=due, legal=legal)
