"""Quantisers and routers are step functions: a step may differ only next to its edge."""

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import Quantized, Routes, round_e4m3
from reports.verdict.band import SMALLEST_SCORE
from reports.verdict.decode import codes_f64, scales_f64
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Rows

QUANTISER = "quantiser rule"
ROUTER = "router rule"


def check_quantiser(
    ledger: Ledger,
    stage: Stage,
    tensor: str,
    rows: Rows,
    *,
    values: Tensor,
    scale: Tensor,
    want: Quantized,
    noise: float,
) -> None:
    """Hold codes and scales against the golden's quantiser of the same input.

    Every code must be one the golden could have rounded to, had its value moved by the declared
    noise. UE8M0 scales must be equal; fp32 scales may differ by one last place.

    Args:
        ledger: takes the findings.
        stage: where the quantiser is.
        tensor: name of the codes in the trace; the scales are ``<name>_scale``.
        rows: coordinates of R rows.
        values: [R, C] e4m3 codes.
        scale: [R, G] fp32 or [R, ceil(G/4)] int32.
        want: the golden's codes and scales.
        noise: relative error declared in front of the rounding to a code.
    """
    got = codes_f64(values)
    edges = (round_e4m3(want.scaled * (1 - noise)), round_e4m3(want.scaled * (1 + noise)))
    lowest, highest = torch.minimum(*edges), torch.maximum(*edges)
    fits = (got >= lowest) & (got <= highest)
    ledger.steps(QUANTISER, stage, tensor, rows, got=got, want=want.codes, legal=fits)
    got_scale = scales_f64(scale, want.scale.shape[1])
    if scale.dtype == torch.float32:
        places = (scale.view(torch.int32) - want.scale.to(torch.float32).view(torch.int32)).abs()
        fits_scale = places <= 1
    else:
        fits_scale = (got_scale == want.scale) | (got_scale.isnan() & want.scale.isnan())
    ledger.steps(
        QUANTISER,
        stage,
        f"{tensor}_scale",
        rows,
        got=got_scale,
        want=want.scale,
        legal=fits_scale,
    )


def check_routes(
    ledger: Ledger, rows: Rows, *, ids: Tensor, want: Routes, noise: float, bias: Tensor | None
) -> Tensor:
    """Hold the chosen experts against the golden's choice from the same logits.

    A slot may hold another expert than the golden's only if the two ranked scores are closer than
    their declared noise; exact ties must go to the lowest id.

    Args:
        ledger: takes the findings.
        rows: coordinates of T tokens.
        ids: [T, K] integer ids of the run.
        want: the golden's routes.
        noise: relative error of a score.
        bias: [E] float64 correction bias, or None.

    Returns:
        [T] bool: tokens whose routes are legal.
    """
    num_experts = want.ranked.shape[1]
    legal_id = (ids >= 0) & (ids < num_experts)
    chosen = ids.to(torch.int64).clamp(0, num_experts - 1)
    ranked_got = want.ranked.gather(1, chosen)
    ranked_want = want.ranked.gather(1, want.ids)
    added = torch.zeros(num_experts, dtype=torch.float64) if bias is None else bias
    size = ranked_want.abs() + ranked_got.abs() + added[chosen].abs() + added[want.ids].abs()
    margin = noise * size + 2 * SMALLEST_SCORE
    near = (ranked_got != ranked_want) & ((ranked_got - ranked_want).abs() <= margin)
    same = ids.to(torch.int64) == want.ids
    distinct = chosen.sort(dim=1).values.diff(dim=1).ne(0).all(dim=1, keepdim=True)
    fits = legal_id & (same | near) & distinct
    ledger.steps(
        ROUTER,
        Stage.ROUTE,
        "topk_ids",
        rows,
        got=ids.to(torch.float64),
        want=want.ids.to(torch.float64),
        legal=fits,
    )
    return fits.all(dim=1)
