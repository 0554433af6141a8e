"""What is kept of a judged forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe.golden import GoldenTokens
from reports.verdict.certificate import CertificateFacts
from reports.verdict.end_to_end import EndToEnd
from reports.verdict.formats.view import DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.twins import NoiseOfStage
from reports.verdict.weight_changes import WeightChange


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judgement:
    """What the checks of one forward found.

    ledger       every comparison's worst and all deviations, earliest stage first
    ideal        the golden without rounding
    same_recipe  the golden with the recipe's rounding points, on the run's legal routes; of both
                 the tokens' values alone are kept
    end_to_end   inherited errors
    noise        what twins of the golden differ by, stage by stage; empty where none were asked for
    calls_due    each rank's collectives, as topology and routes call for them
    weight_changes  what preparation and the recipe did to the weights
    certificate  what exact mode could prove of the inputs; None in other modes
    topk_ids, topk_weights, output  the run's own, in global token order: [T, K], [T, K], [T, H]
    """

    ledger: Ledger
    ideal: GoldenTokens
    same_recipe: GoldenTokens
    end_to_end: EndToEnd
    noise: Sequence[NoiseOfStage]
    calls_due: Sequence[Sequence[DueCall]]
    weight_changes: Sequence[WeightChange]
    topk_ids: Tensor
    topk_weights: Tensor
    output: Tensor
    certificate: CertificateFacts | None = None
