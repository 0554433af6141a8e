"""Quantisers and routers are step functions: a step may differ only next to its edge."""

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenRouting, Quantized, Routes, round_e4m3
from reports.verdict.band import SMALLEST_SCORE
from reports.verdict.decode import codes_f64, scales_f64
from reports.verdict.ledger import Ledger
from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows

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
    got, got_scale = codes_f64(values), scales_f64(scale, want.scale.shape[1])
    low, high = code_limits(want.scaled, noise)
    fits = (got >= low) & (got <= high)
    fits_scale = _legal_scales(scale, got_scale, want.scale)
    by_group = fits.view(*got_scale.shape, fits.shape[1] // got_scale.shape[1])
    is_wrong = ~(by_group.all(-1) & fits_scale)
    note = QuantiserNote(codes=got, scale=got_scale, want=want, noise=noise, is_wrong=is_wrong)
    for name, cells, due, legal in (
        (tensor, got, want.codes, fits),
        (f"{tensor}_scale", got_scale, want.scale, fits_scale),
    ):
        ledger.steps(QUANTISER, stage, name, rows, got=cells, want=due, legal=legal, note=note)


def code_limits(scaled: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """(lowest, highest) e4m3 value that ``scaled`` [R, C] may round to, moved by ``noise``."""
    edges = (round_e4m3(scaled * (1 - noise)), round_e4m3(scaled * (1 + noise)))
    return torch.minimum(*edges), torch.maximum(*edges)


def _legal_scales(scale: Tensor, got: Tensor, want: Tensor) -> Tensor:
    """[R, G] bool: the golden's scales; those with a mantissa may be one place off."""
    if scale.dtype == torch.float32:
        due = want.to(torch.float32).view(torch.int32)
        apart = row_major_bits(scale).to(torch.int64) - due.to(torch.int64)  # int32 overflows
        return apart.abs() <= 1
    return (got == want) | (got.isnan() & want.isnan())


def row_major_bits(scale: Tensor) -> Tensor:
    """The bits of fp32 scales as int32, whatever their strides."""
    return scale.clone(memory_format=torch.contiguous_format).view(torch.int32)


def check_routes(
    ledger: Ledger,
    rows: Rows,
    *,
    ids: Tensor,
    want: Routes,
    noise: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Hold the chosen experts against the golden's choice from the same logits.

    A slot may hold another expert than the golden's only if the two ranked scores are closer than
    their declared noise; exact ties must go to the lowest id.

    Args:
        ledger: takes the findings.
        rows: coordinates of T tokens.
        ids: [T, K] integer ids of the run.
        want: the golden's routes.
        noise: [T, E] relative error of a score.
        bias: [E] float64 correction bias, or None.

    Returns:
        [T] bool: tokens whose routes are legal.
    """
    num_experts = want.ranked.shape[1]
    legal_id = (ids >= 0) & (ids < num_experts)
    chosen = ids.to(torch.int64).clamp(0, num_experts - 1)
    ranked_got, ranked_want = want.ranked.gather(1, chosen), want.ranked.gather(1, want.ids)
    margin = _margin(want.ranked, noise, bias)
    allowed = margin.gather(1, chosen) + margin.gather(1, want.ids)
    near = (ranked_got != ranked_want) & ((ranked_got - ranked_want).abs() <= allowed)
    same = ids.to(torch.int64) == want.ids
    repeats = (chosen[:, :, None] == chosen[:, None, :]).sum(2) > 1
    fits = legal_id & (same | (near & ~repeats))
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


def _margin(ranked: Tensor, noise: Tensor, bias: Tensor | None) -> Tensor:
    """[T, E] what noise may do to a ranked score; an infinite one has none."""
    added = torch.zeros(ranked.shape[1], dtype=torch.float64) if bias is None else bias.abs()
    finite = ranked.nan_to_num(posinf=0.0, neginf=0.0)
    return noise * (finite.abs() + 2 * added) + SMALLEST_SCORE


def groups_the_run_may_use(
    ids: Tensor, want: Routes, routing: GoldenRouting, noise: Tensor, bias: Tensor | None
) -> Tensor:
    """[T, G] bool: the run's groups where their scores lie within noise of the golden's.

    A group of the run's that the golden left out stands in for a chosen one only if it scores as
    high as the lowest of them, up to noise; otherwise the golden's groups stay, and the run's
    experts outside them are wrong.

    Args:
        ids: [T, K] integer ids of the run.
        want: the golden's routes, with group scores.
        routing: the rule.
        noise: [T, E] relative error of a score.
        bias: [E] float64 correction bias, or None.
    """
    scores = want.group_scores
    assert scores is not None
    tokens, groups = scores.shape
    experts = want.ranked.shape[1]
    of_id = ids.to(torch.int64).clamp(0, experts - 1) * groups // experts
    used = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, of_id, True)
    lowest = scores.topk(routing.topk_group, dim=1).values[:, -1:]
    margin = _margin(torch.ones_like(want.ranked), noise, bias)  # such scores are at most 1
    in_groups = margin.view(tokens, groups, experts // groups)
    of_group = in_groups.topk(min(2, experts // groups), dim=2).values.sum(2)
    within = scores >= lowest - 2 * of_group.amax(dim=1, keepdim=True)
    may_use = (~used | within).all(dim=1, keepdim=True)
    priority = scores.masked_fill(used & may_use, torch.inf)
    place = priority.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    return place < routing.topk_group
