"""All checks of one forward, in the order a token passes the stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import SharedExpertMode, Stage
from moe.golden import (
    GoldenModel,
    GoldenTrace,
    RoundingPath,
    SharedInSum,
    golden_forward,
)
from moe.trace import RankTrace
from reports.verdict.accounts import check_accounts
from reports.verdict.contracts import check_contracts
from reports.verdict.determinism import check_rerun
from reports.verdict.end_to_end import EndToEnd, measure
from reports.verdict.format_views import view_of
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.plan_check import check_plan
from reports.verdict.readable import check_readable
from reports.verdict.stage_experts import (
    check_activation,
    check_dispatch,
    check_gemm1,
    check_gemm2,
    check_pre_permute,
)
from reports.verdict.stage_glue import check_glue_in, check_glue_out
from reports.verdict.stage_route import check_route
from reports.verdict.stage_tail import check_tail
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject
from reports.verdict.weight_changes import WeightChange, weight_changes
from reports.verdict.weights import StreamedWeights, expert_sizes, ideal_weights
from topology.collectives import CollectiveCall
from topology.sync import Gather, Reducer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judgement:
    """What the checks of one forward found.

    ledger       every comparison's worst and all deviations, earliest stage first
    ideal        the golden without rounding
    same_recipe  the golden with the recipe's rounding points, on the run's legal routes
    end_to_end   inherited errors
    weight_changes  what preparation and the recipe did to the weights
    topk_ids, topk_weights, output  the run's own, in global token order: [T, K], [T, K], [T, H]
    """

    ledger: Ledger
    ideal: GoldenTrace
    same_recipe: GoldenTrace
    end_to_end: EndToEnd
    weight_changes: Sequence[WeightChange]
    topk_ids: Tensor
    topk_weights: Tensor
    output: Tensor


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
        self._weight_changes: Sequence[WeightChange] | None = None

    def judge(
        self,
        batch: Batch,
        traces: Sequence[RankTrace],
        calls: Sequence[Sequence[CollectiveCall]],
    ) -> Judgement:
        """Run every check on one forward, and both goldens beside it.

        Args:
            batch: the global token list that went in.
            traces: one a rank, in rank order.
            calls: each rank's collectives, in order.

        Raises:
            UnreadableTraceError: a trace lacks a tensor, or has one of another shape.
        """
        subject = self.subject(batch, traces)
        ledger, legal = self._checked(subject, calls)
        ideal, same_recipe = self._goldens(subject, self._judged_weights(traces), legal)
        return Judgement(
            ledger=ledger,
            ideal=ideal,
            same_recipe=same_recipe,
            end_to_end=measure(subject, same_recipe, ideal),
            weight_changes=self._changes_of_weights(self._judged_weights(traces)),
            topk_ids=subject.of_tokens(Stage.ROUTE, "topk_ids"),
            topk_weights=subject.of_tokens(Stage.ROUTE, "topk_weights"),
            output=subject.of_tokens(Stage.GLUE_OUT, "hidden_states"),
        )

    def check(
        self,
        batch: Batch,
        traces: Sequence[RankTrace],
        calls: Sequence[Sequence[CollectiveCall]],
    ) -> Ledger:
        """``judge`` without the goldens, which decide nothing: what the checks entered."""
        return self._checked(self.subject(batch, traces), calls)[0]

    def check_rerun(
        self,
        batch: Batch,
        first: Sequence[RankTrace],
        again: Sequence[RankTrace],
        ledger: Ledger,
    ) -> None:
        """Enter where two forwards of the same tokens differ in a bit.

        Args:
            batch: what went into both.
            first: traces of the earlier one.
            again: traces of the later one.
            ledger: of the later one.
        """
        check_rerun(self.subject(batch, first), self.subject(batch, again), ledger)
        ledger.sort()

    def subject(self, batch: Batch, traces: Sequence[RankTrace]) -> Subject:
        """The traces with their rows mapped.

        Raises:
            UnreadableTraceError: see ``judge``.
        """
        view = view_of(self._layer)
        check_plan(self._layer)
        check_readable(self._layer, view, traces)
        return Subject(self._layer, view, batch, traces)

    def _checked(
        self, subject: Subject, calls: Sequence[Sequence[CollectiveCall]]
    ) -> tuple[Ledger, Tensor]:
        """Every check in order, and [all layer rows] bool: rows whose chosen experts are legal."""
        weights = self._judged_weights(subject.traces)
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
        subject.view.check_post_permute(subject, ledger)
        subject.view.check_combine(subject, ledger)
        check_tail(subject, weights, ledger)
        check_glue_out(subject, weights, ledger)
        ledger.sort()
        return ledger, legal

    def _judged_weights(self, traces: Sequence[RankTrace]) -> JudgedWeights:
        if self._weights is None:
            self._weights = JudgedWeights(self._layer, traces, self._weights_ledger)
        return self._weights

    def _ideal(self) -> StreamedWeights:
        """Weights before any rounding of the recipe; kept."""
        if self._ideal_weights is None:
            self._ideal_weights = ideal_weights(self._layer.weights, expert_sizes(self._layer))
        return self._ideal_weights

    def _changes_of_weights(self, weights: JudgedWeights) -> Sequence[WeightChange]:
        """Measured once: preparation does not depend on tokens."""
        if self._weight_changes is None:
            self._weight_changes = weight_changes(
                weights.preparation, weights.golden, self._ideal(), self._layer.num_experts
            )
        return self._weight_changes

    def _goldens(
        self, subject: Subject, weights: JudgedWeights, legal: Tensor
    ) -> tuple[GoldenTrace, GoldenTrace]:
        """Ideal and same-recipe forward of the same tokens."""
        unrounded = self._ideal()
        layer, batch = self._layer, subject.batch
        model = golden_model(layer)
        pins = {"topk_ids": batch.topk_ids, "topk_weights": batch.topk_weights}
        ideal = golden_forward(
            model,
            unrounded,
            batch.hidden_states,
            rounding=False,
            input_ids=batch.input_ids,
            **pins,
        )
        run = subject.first_rows(~subject.is_masked, subject.layer_rows)
        run_ids = subject.layer_tensor(Stage.ROUTE, "topk_ids").to(torch.int64)[run]
        slots = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.int64)[run]
        pins["topk_ids"] = torch.where(legal[run][:, None], run_ids, ideal.topk_ids)
        same_recipe = golden_forward(
            model,
            weights.golden,
            batch.hidden_states,
            rounding=True,
            ep_ranks=slots.clamp(0, len(layer.slot_experts) - 1) // layer.slots_per_rank,
            **pins,
        )
        return ideal, same_recipe


def golden_model(layer: JudgedLayer) -> GoldenModel:
    """What the golden computes for this layer."""
    view = view_of(layer)
    return GoldenModel(
        routing=layer.routing,
        routed_scaling_factor=layer.routed_scaling_factor,
        activation=layer.activation,
        recipe=layer.recipe,
        scale_format=layer.scale_format,
        wire_format=layer.wire_format if layer.requantises else None,
        input_group=layer.scales_of(Stage.PRE_PERMUTE, "rows.hidden_states").group_size or None,
        expert_hidden_size=layer.expert_hidden_size,
        path=RoundingPath(
            ep_size=layer.layout.ep,
            moe_tp=layer.layout.moe_tp,
            folds_factor=view.folds_factor,
            scales_stored_sum=layer.wide_segments,
            partials=view.partials,
            stores_weights=view.stores_weights,
            low_latency_wire=view.low_latency_wire,
            shared=_shared_in_sum(layer),
            layout=layer.gemm_layout,
            gathers_fp8=layer.gathers_fp8 and layer.sync.gather is Gather.ALL_GATHER_V,
            shared_before_gather=layer.shared is SharedExpertMode.LOCAL,
        ),
    )


def _shared_in_sum(layer: JudgedLayer) -> SharedInSum:
    """What of the shared expert enters the sum over the ranks."""
    if layer.shared is SharedExpertMode.TP_SHARDED:
        return SharedInSum.SHARDED
    deferred = layer.sync.reducer is Reducer.GLUE_OUT
    if layer.shared is SharedExpertMode.REPLICATED and deferred:
        return SharedInSum.FIRST_RANK
    return SharedInSum.ABSENT
