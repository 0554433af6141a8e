"""All checks of one forward, in the order a token passes the stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenModel, GoldenTrace, golden_forward
from moe.trace import RankTrace
from reports.verdict.accounts import check_accounts
from reports.verdict.contracts import check_contracts
from reports.verdict.end_to_end import EndToEnd, measure
from reports.verdict.ledger import Ledger
from reports.verdict.readable import check_readable
from reports.verdict.stage_experts import (
    check_activation,
    check_dispatch,
    check_gemm1,
    check_gemm2,
    check_post_permute,
    check_pre_permute,
)
from reports.verdict.stage_tokens import (
    check_combine,
    check_glue_in,
    check_glue_out,
    check_route,
    check_tail,
)
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import JudgedLayer, Subject
from reports.verdict.weights import StreamedWeights, ideal_weights
from topology.collectives import CollectiveCall


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judgement:
    """What the checks of one forward found.

    ledger       every comparison's worst and all deviations, earliest stage first
    ideal        the golden without rounding
    same_recipe  the golden with the recipe's rounding points, on the run's legal routes
    end_to_end   inherited errors
    """

    ledger: Ledger
    ideal: GoldenTrace
    same_recipe: GoldenTrace
    end_to_end: EndToEnd


class Judge:
    """Judges forwards of one layer; weights are compared and decoded once.

    Args:
        layer: facts of the layer.
        blinded: checks that report nothing (an injected fault of the checker).
    """

    def __init__(self, layer: JudgedLayer, blinded: frozenset[str] = frozenset()) -> None:
        self._layer = layer
        self._blinded = blinded
        self._weights: JudgedWeights | None = None
        self._weights_ledger = Ledger(blinded=blinded)
        self._ideal_weights: StreamedWeights | None = None

    def judge(
        self,
        hidden_states: Tensor,
        traces: Sequence[RankTrace],
        calls: Sequence[Sequence[CollectiveCall]],
    ) -> Judgement:
        """Run every check on one forward.

        Args:
            hidden_states: [T, H] bf16 global token list that went in.
            traces: one a rank, in rank order.
            calls: each rank's collectives, in order.

        Raises:
            UnreadableTraceError: a trace lacks a tensor, or has one of another shape.
        """
        check_readable(self._layer, traces)
        subject = Subject(self._layer, hidden_states, traces)
        weights = self._judged_weights(traces)
        ledger = self._weights_ledger.copy()
        check_accounts(subject, calls, ledger)
        check_contracts(subject, ledger)
        check_glue_in(subject, ledger)
        legal = check_route(subject, weights, ledger)
        check_dispatch(subject, ledger)
        check_pre_permute(subject, ledger)
        check_gemm1(subject, weights, ledger)
        check_activation(subject, ledger)
        check_gemm2(subject, weights, ledger)
        check_post_permute(subject, ledger)
        check_combine(subject, ledger)
        check_tail(subject, weights, ledger)
        check_glue_out(subject, ledger)
        ledger.sort()
        ideal, same_recipe = self._goldens(subject, weights, legal)
        return Judgement(
            ledger=ledger,
            ideal=ideal,
            same_recipe=same_recipe,
            end_to_end=measure(subject, same_recipe, ideal),
        )

    def _judged_weights(self, traces: Sequence[RankTrace]) -> JudgedWeights:
        if self._weights is None:
            self._weights = JudgedWeights(self._layer, traces, self._weights_ledger)
        return self._weights

    def _goldens(
        self, subject: Subject, weights: JudgedWeights, legal: Tensor
    ) -> tuple[GoldenTrace, GoldenTrace]:
        """Ideal and same-recipe forward of the same tokens."""
        if self._ideal_weights is None:
            self._ideal_weights = ideal_weights(self._layer.weights, weights.intermediate_size)
        model = golden_model(self._layer)
        x = subject.hidden_states
        ideal = golden_forward(model, self._ideal_weights, x, rounding=False)
        run_ids = subject.token_tensor(Stage.ROUTE, "topk_ids").to(torch.int64)
        ids = torch.where(legal[:, None], run_ids, ideal.topk_ids)
        same_recipe = golden_forward(model, weights.golden, x, rounding=True, topk_ids=ids)
        return ideal, same_recipe


def golden_model(layer: JudgedLayer) -> GoldenModel:
    """What the golden computes for this layer."""
    return GoldenModel(
        top_k=layer.top_k,
        renormalize=layer.renormalize,
        routed_scaling_factor=layer.routed_scaling_factor,
        swiglu_limit=layer.swiglu_limit,
        recipe=layer.recipe,
        scale_format=layer.scale_format,
        expert_rank=layer.expert_rank,
    )
