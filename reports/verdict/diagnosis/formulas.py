"""Activations by another formula: clamps missing or misplaced, halves exchanged, others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF
from moe.formats import ActivationKind, GatedActivation, Stage
from moe.golden import Stores, clamped, gated, gated_as_stored, stores_of
from moe.mistakes import Mistake
from reports.verdict.band import activation_noise, stored_bf16, stored_fp32
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.rows import take_rows

Order = Callable[[Tensor], Tensor]
"""[R, 2I] float64, gate columns first -> the same in another order."""

Formula = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The same -> ([R, I] product, [R, I] magnitude whose error it carries)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OtherFormula:
    """What an expert may compute instead.

    mistake  its kind
    words    what is wrong
    rule     whose error its product carries
    formula  the product
    """

    mistake: Mistake
    words: str
    rule: GatedActivation
    formula: Formula


def other_formulas(case: Case) -> Iterator[Explanation]:
    """Each formula, on the traced gate and up of the wrong rows."""
    whole = case.whole
    gate_up = _gate_up(whole)
    if gate_up is None:
        return
    formulas = list(formulas_but(case.layer.activation))
    for other in formulas:
        fits, is_other = _fits(whole, gate_up, other)
        explains = case.lawful(fits) & is_other[: len(case.here)]
        yield Explanation(
            mistake=other.mistake,
            words=f"{other.words}: {_said(case, explains)}",
            explains=explains,
            cost=bits_of_choice(len(formulas)),
        )


def _gate_up(case: Case) -> Tensor | None:
    """[W, 2I] float64 input of the wrong rows' activation."""
    subject = case.subject
    if (case.stage, case.tensor) == (Stage.ACTIVATION, "activation"):
        rows = subject.placed[case.rank].row[case.within]
        return take_rows(subject.grouped(Stage.GEMM1, case.rank, "gate_up"), rows).double()
    if case.tensor == "shared.activation":
        return subject.stage(case.stage, case.rank)["shared.gate_up"][case.within].double()
    return None


def _fits(case: Case, gate_up: Tensor, other: OtherFormula) -> tuple[Tensor, Tensor]:
    """[W] bool: rows that the formula gives within its own band, and that the due one does not."""
    value, size = other.formula(gate_up)
    noise = activation_noise(gate_up, size, other.rule, case.layer.arithmetic)
    if case.traced is not None and case.traced.dtype == torch.float32:
        band = stored_fp32(value, noise)
    else:
        stores = stores_of(case.layer.activation, case.layer.gemm_layout, case.layer.scale_format)
        if stores is Stores.SILU_AND_PRODUCT:
            noise = noise + BF16_ROUNDOFF * value.abs()
        band = stored_bf16(value, noise)
    is_near = ((case.got - value).abs() <= band) | (case.got.isnan() & value.isnan())
    return is_near.all(1), ((case.got - case.want).abs() > band).any(1)


def formulas_but(due: GatedActivation) -> Iterator[OtherFormula]:
    """Everything but what is due."""
    free = replace(due, limit=None)
    if due.limit is not None:
        yield from _clamps(due, due.limit, free)
    plain = GatedActivation()
    if due.kind is not ActivationKind.SILU:
        yield _as_rule("silu(gate) * up computed, whatever the model says", plain)
    if due.kind is ActivationKind.OAI_SWIGLU:
        yield _as_rule("alpha missing from the sigmoid", replace(due, alpha=1.0))
        for rule, clamp in ((due, ""), (free, ", and nothing is clamped")):
            for formula in (_without_one(rule), _one_taken_back(rule)):
                yield OtherFormula(
                    mistake=Mistake.ACTIVATION,
                    words=f"the 1 that belongs to up is missing{clamp}",
                    rule=rule,
                    formula=formula,
                )
    if due.kind is ActivationKind.SITU:
        yield OtherFormula(
            mistake=Mistake.ACTIVATION,
            words="tan computed, where tanh is due",
            rule=due,
            formula=_by_tan(due),
        )
    for words, order in (("exchanged", _exchanged), ("read as if they took turns", _interleaved)):
        yield OtherFormula(
            mistake=Mistake.GATE_UP_SWAPPED,
            words=f"gate and up {words}",
            rule=due,
            formula=_reordered(due, order),
        )


def _as_rule(words: str, rule: GatedActivation) -> OtherFormula:
    return OtherFormula(
        mistake=Mistake.ACTIVATION,
        words=words,
        rule=rule,
        formula=lambda gate_up: _product(gate_up, rule),
    )


def _product(gate_up: Tensor, rule: GatedActivation) -> tuple[Tensor, Tensor]:
    """By a rule, as kernels hold its numbers."""
    value = gated_as_stored(gate_up, rule, Stores.NOTHING)
    return value, value


def _clamps(due: GatedActivation, limit: float, free: GatedActivation) -> Iterator[OtherFormula]:
    """No clamp, one of the product, or one of a half alone."""
    yield _as_rule(f"gate and up not clamped at {limit:g}", free)
    yield OtherFormula(
        mistake=Mistake.ACTIVATION,
        words=f"the product clamped at {limit:g}, not gate and up",
        rule=free,
        formula=lambda gate_up: _clamped_product(gate_up, free, limit),
    )
    for half, words in enumerate(("up not clamped, gate is", "gate not clamped, up is")):
        yield OtherFormula(
            mistake=Mistake.ACTIVATION,
            words=f"{words}, at {limit:g}",
            rule=free,
            formula=_half_clamped(free, limit, half),
        )


def _clamped_product(gate_up: Tensor, free: GatedActivation, limit: float) -> tuple[Tensor, Tensor]:
    value = _product(gate_up, free)[0].clamp(-limit, limit)
    return value, value


def _half_clamped(free: GatedActivation, limit: float, half: int) -> Formula:
    """Gate at most the limit, or up within it; the other half as it is."""

    def formula(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, dim=1)
        if half == 0:
            return _product(torch.cat([gate.clamp(max=limit), up], dim=1), free)
        return _product(torch.cat([gate, up.clamp(-limit, limit)], dim=1), free)

    return formula


def _without_one(rule: GatedActivation) -> Formula:
    """An oai_swiglu is linear in ``up + 1``: as if up were smaller by 1 once it is clamped."""

    def formula(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = clamped(gate_up, rule.limit)
        free = replace(rule, limit=None)
        value = gated(torch.cat([gate, up - 1.0], dim=1), free)
        return value, value

    return formula


def _one_taken_back(rule: GatedActivation) -> Formula:
    """The same as a difference of two products, each with a stored ``up + 1``."""

    def formula(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, dim=1)
        whole = _product(gate_up, rule)[0]
        of_one = _product(torch.cat([gate, torch.zeros_like(up)], dim=1), rule)[0]
        return whole - of_one, whole.abs() + of_one.abs()

    return formula


def _by_tan(rule: GatedActivation) -> Formula:
    """A situ with the wrong one of two functions."""
    alpha, bound = rule.alpha or 1.0, rule.linear_limit or 1.0

    def formula(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, dim=1)
        bent = alpha * torch.tan(gate / alpha) * torch.sigmoid(gate)
        value = bent * bound * torch.tan(up / bound)
        return value, value

    return formula


def _exchanged(gate_up: Tensor) -> Tensor:
    return gate_up.roll(gate_up.shape[1] // 2, dims=1)


def _interleaved(gate_up: Tensor) -> Tensor:
    return torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)


def _reordered(rule: GatedActivation, order: Order) -> Formula:
    return lambda gate_up: _product(order(gate_up), rule)


def _said(case: Case, explains: Tensor) -> str:
    """The cell that shows it best."""
    if not bool(explains.any()):
        return listed([])
    error = torch.where(case.wrong, (case.got - case.want).abs(), -1.0)
    at = int(error.amax(1).masked_fill(~explains, -1.0).argmax())
    column = int(error[at].argmax())
    return (
        f"{name_of(case.rows, at)} column {column} is {float(case.got[at, column]):.4g}, "
        f"due {float(case.want[at, column]):.4g}"
    )
