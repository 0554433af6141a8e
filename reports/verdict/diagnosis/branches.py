"""The routed and the shared branch: a scaling factor, or a shared expert, of the wrong number."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.sums import TermSum, law_of_rank, shown

ROUTED, SHARED = 0, 1
POWERS = ((2, "applied twice"), (0, "not applied"), (-1, "applied as its inverse"))
"""Of the scaling factor, where 1 is due."""


def scaled_wrongly(case: Case) -> Iterator[Explanation]:
    """The scaling factor to another power than 1."""
    factor, branches = case.layer.routed_scaling_factor, branches_of(case.whole)
    if branches is None or factor in (0.0, 1.0):
        return
    for power, how in POWERS:
        times = factor ** (power - 1)
        law = branches.constant([times, 1.0])
        explains = law_of_rank(case, branches, law)
        fit = branches.mean_fit(ROUTED, explains)
        yield Explanation(
            mistake=Mistake.SCALING_FACTOR,
            words=f"routed_scaling_factor {how}: the {branches.names[ROUTED]} has coefficient "
            f"{shown(fit * factor)}, due {factor:g}",
            explains=explains,
            cost=bits_of_choice(len(POWERS)),
            evidence=branches.bits_of(law, explains),
        )


def shared_wrongly(case: Case) -> Iterator[Explanation]:
    """The shared expert missing, or added as often as a group has ranks, or as a part of that."""
    branches = branches_of(case.whole)
    if branches is None:
        return
    counts = _group_sizes(case)
    often = [0.0, *map(float, counts), *(1.0 / count for count in counts)]
    for times in often:
        law = branches.constant([1.0, times])
        explains = law_of_rank(case, branches, law)
        fit = branches.mean_fit(SHARED, explains)
        how = "missing" if times == 0 else f"counted {times:.4g} times"
        yield Explanation(
            mistake=Mistake.SHARED_EXPERT,
            words=f"shared expert {how}: its coefficient is {shown(fit)}, due 1",
            explains=explains,
            cost=bits_of_choice(len(often)),
            evidence=branches.bits_of(law, explains),
        )


def branches_of(case: Case) -> TermSum | None:
    """The routed and the shared part of what a rank adds up in the tail, or behind it."""
    parts = _parts(case)
    if parts is None:
        return None
    routed, shared, name = parts
    terms = torch.stack([routed, shared])[:, case.within].to(torch.float64)
    return TermSum(
        names=(name, "shared expert"),
        terms=terms,
        due=torch.ones(terms.shape[:2], dtype=torch.float64),
        got=case.got,
    )


def _parts(case: Case) -> tuple[Tensor, Tensor, str] | None:
    """(routed, shared, what the routed part is called), of all the rank's rows."""
    layer, tail = case.layer, case.subject.stage(Stage.TAIL, case.rank)
    if case.check_is_move:
        return None
    match case.stage, case.tensor:
        case Stage.TAIL, "output" if layer.is_all_to_all:
            routed = case.subject.stage(Stage.COMBINE, case.rank)["routed"].to(torch.float64)
            factor = 1.0 if case.subject.view.folds_factor else layer.routed_scaling_factor
            return factor * routed, _shared_or_zero(tail.get("shared.output"), routed), "routed sum"
        case Stage.TAIL, "summand":
            partial = case.subject.stage(Stage.COMBINE, case.rank)["routed"].to(torch.float64)
            adds = case.rank in layer.ranks_with_shared_in_tail and (
                layer.shared is not SharedExpertMode.REPLICATED or case.sums_in_glue
            )
            shared = tail.get("shared.output") if adds else None
            return partial, _shared_or_zero(shared, partial), "rank's partial sum"
        case Stage.TAIL, "output" if "reduced" in tail and "shared.output" in tail:
            reduced = tail["reduced"].to(torch.float64)
            return reduced, tail["shared.output"].to(torch.float64), "sum over the ranks"
        case Stage.GLUE_OUT, "hidden_states" if layer.shared is SharedExpertMode.LOCAL:
            left = case.subject.stage(Stage.GLUE_OUT, case.rank)
            returned = left["returned"].to(torch.float64)
            return returned, left["shared.output"].to(torch.float64), "returned sum"
    return None


def _shared_or_zero(shared: Tensor | None, routed: Tensor) -> Tensor:
    return torch.zeros_like(routed) if shared is None else shared.to(torch.float64)


def _group_sizes(case: Case) -> list[int]:
    """Sizes of the groups of ranks that something may be counted over."""
    layout = case.layer.layout
    sizes = {2, layout.world_size, layout.attn_tp, layout.attn_dp, layout.ep, layout.moe_tp}
    return sorted(sizes - {0, 1})
