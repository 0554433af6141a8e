"""Exact mode: certified cells of every stage hold the one value that they can hold.

Comparison is end to end, so whatever is wrong is inherited by all that follows. It is entered once:
at the earliest stage where a certified cell differs, and if a stage before it has been found wrong
by its own error already, there.
"""

from collections.abc import Iterator
from dataclasses import replace

from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.exact_compared import Compared
from reports.verdict.exact_experts import of_experts, of_inputs, of_wire
from reports.verdict.exact_output import of_combined, of_output, of_partials, of_shared
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.subject import Subject

EXACT = "exact"


def check_exact(
    subject: Subject, stages: CertifiedLayer, sums: CertifiedSums, ledger: Ledger
) -> None:
    """Compare stage by stage, up to the first one that differs.

    Args:
        subject: the forward.
        stages: certified values up to the experts' outputs.
        sums: and behind them.
        ledger: takes the finding; has those of the other checks.
    """
    ledger.ask(EXACT)
    found = Ledger(blinded=ledger.blinded)
    for one in _compared(subject, stages, sums):
        if found.deviations and one.stage is not found.deviations[0].stage:
            break
        legal = (one.got == one.want) | ~one.is_certain  # what is certain is a number
        found.steps(EXACT, one.stage, one.tensor, one.rows, got=one.got, want=one.want, legal=legal)
    for deviation in found.deviations:
        ledger.report(_at_its_cause(deviation, ledger))


def _at_its_cause(deviation: Deviation, ledger: Ledger) -> Deviation:
    """Where an earlier stage is known to be wrong, the difference is its: nothing new to blame."""
    earlier = [
        one
        for one in ledger.deviations
        if one.check != EXACT and one.stage.position < deviation.stage.position
    ]
    if not earlier:
        return deviation
    cause = min(earlier, key=lambda one: one.blame)
    seen = f"inherited: certified cells of {deviation.tensor} differ in stage {deviation.stage} "
    return replace(cause, check=EXACT, detail=f"{seen}on rank {deviation.rank}; {deviation.detail}")


def _compared(subject: Subject, stages: CertifiedLayer, sums: CertifiedSums) -> Iterator[Compared]:
    """Everything that has one value, in the order of the stages."""
    yield from of_inputs(subject, stages)
    yield from of_wire(subject, stages)
    yield from of_experts(subject, stages)
    yield from of_partials(subject, stages, sums)
    yield from of_combined(subject, sums)
    yield from of_shared(subject, stages)
    yield from of_output(subject, sums)
