"""Exact mode: certified cells of every stage hold the one value that they can hold.

Comparison is end to end, so whatever is wrong is inherited by all that follows. It is entered once:
at the earliest stage where a certified cell differs, and if the own error of a stage before it, on
the way of the same tokens, has been found already, there.
"""

from collections.abc import Iterable, Iterator

from moe.formats import Stage
from reports.verdict.captured import where_captured
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.deviation import NotAsked
from reports.verdict.exact_cause import at_its_cause
from reports.verdict.exact_compared import EXACT, Compared
from reports.verdict.exact_experts import (
    of_activation,
    of_gate_up,
    of_grouped,
    of_inputs,
    of_products,
    of_weights,
    of_wire,
)
from reports.verdict.exact_output import (
    of_combined,
    of_finished,
    of_output,
    of_partials,
    of_shared,
)
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Subject


def check_exact(subject: Subject, compared: Iterable[Compared], ledger: Ledger) -> None:
    """Compare stage by stage, up to the first one that differs.

    Args:
        subject: the forward.
        compared: everything that has one value, in the order of the stages; taken to its end.
        ledger: takes the finding; has those of the other checks.
    """
    ledger.ask(EXACT)
    found = Ledger(blinded=ledger.blinded)
    for one in compared:
        if found.deviations and one.stage is not found.deviations[0].stage:
            continue
        legal = (one.got == one.want) | ~one.is_certain  # what is certain is a number
        found.steps(EXACT, one.stage, one.tensor, one.rows, got=one.got, want=one.want, legal=legal)
    for deviation in found.deviations:
        ledger.report(at_its_cause(deviation, found, ledger, subject))


def compared_cells(
    subject: Subject, stages: CertifiedLayer, sums: CertifiedSums, ledger: Ledger
) -> Iterator[Compared]:
    """Everything that has one value, in the order of the stages; what is not there is put aside.

    Args:
        subject: the forward.
        stages: certified values up to the experts' outputs.
        sums: and behind them.
        ledger: takes what was left out.
    """
    parts: tuple[tuple[Stage, Iterator[Compared | NotAsked]], ...] = (
        (Stage.GLUE_IN, of_inputs(subject, stages)),
        (Stage.ROUTE, of_weights(subject, stages)),
        (Stage.DISPATCH, of_wire(subject, stages)),
        (Stage.PRE_PERMUTE, of_grouped(subject, stages)),
        (Stage.GEMM1, of_gate_up(subject, stages)),
        (Stage.ACTIVATION, of_activation(subject, stages)),
        (Stage.GEMM2, of_products(subject, stages)),
        (Stage.POST_PERMUTE, of_partials(subject, stages, sums)),
        (Stage.COMBINE, of_combined(subject, sums)),
        (Stage.TAIL, of_shared(subject, stages)),
        (Stage.TAIL, of_finished(subject, sums)),
        (Stage.GLUE_OUT, of_output(subject, sums)),
    )
    for stage, part in parts:
        with where_captured(ledger, stage, EXACT):
            for one in part:
                if isinstance(one, NotAsked):
                    ledger.put_aside(one)
                else:
                    yield one
