"""All checks of one forward, in the order a token passes the stages."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.golden import GoldenTokens, GoldenTrace
from moe.trace import RankTrace
from reports.verdict.accounts import check_accounts
from reports.verdict.calls_due import calls_due
from reports.verdict.captured import where_captured
from reports.verdict.certificate import (
    CertificateFacts,
    Reference,
    certified_forward,
    certify,
)
from reports.verdict.certified_bits import CertainValues, certain_values
from reports.verdict.compared import BAND, Comparison
from reports.verdict.contracts import check_contracts
from reports.verdict.determinism import check_rerun
from reports.verdict.deviation import Deviation
from reports.verdict.diagnosis import Diagnosis, Scene, diagnose
from reports.verdict.distribution import check_distribution
from reports.verdict.end_to_end import measure
from reports.verdict.format_views import view_of
from reports.verdict.formats.view import FormatView
from reports.verdict.golden_model import golden_model
from reports.verdict.goldens import ep_ranks_of, first_rows, golden_of
from reports.verdict.judgement import Judgement
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.nominal_weights import NominalWeights
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
from reports.verdict.twins import NoiseOfStage, Twins
from reports.verdict.weight_changes import WeightChange, weight_changes
from reports.verdict.weights import StreamedWeights, expert_sizes, ideal_weights
from topology.collectives import CollectiveCall


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
        self._nominal: NominalWeights | None = None
        self._weight_changes: Sequence[WeightChange] | None = None

    def judge(
        self,
        batch: Batch,
        traces: Sequence[RankTrace],
        calls: Sequence[Sequence[CollectiveCall]],
        num_twins: int = 0,
    ) -> Judgement:
        """Run every check on one forward, and both goldens beside it.

        Args:
            batch: the global token list that went in.
            traces: one a rank, in rank order.
            calls: each rank's collectives, in order.
            num_twins: how many twins of the golden show its noise.

        Raises:
            UnreadableTraceError: a trace lacks a tensor, or has one of another shape.
        """
        subject = self.subject(batch, traces)
        ledger, legal = self._checked(subject, calls)
        weights = self._judged_weights(traces)
        whole, same_recipe = self._goldens(subject, weights, legal, ep_ranks_of(subject))
        end_to_end = measure(subject, same_recipe, whole)
        noise = self._noise(subject, same_recipe, num_twins)
        ideal = whole.of_tokens
        del whole  # routes of goldens are a large part of what a verdict holds
        certificate = self._certified(subject, same_recipe, ledger)
        of_tokens = same_recipe.of_tokens
        del same_recipe
        return Judgement(
            ledger=ledger,
            certificate=certificate,
            ideal=ideal,
            same_recipe=of_tokens,
            end_to_end=end_to_end,
            noise=noise,
            calls_due=[calls_due(subject, rank) for rank in subject.ranks],
            weight_changes=self._changes_of_weights(weights),
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

    def comparisons(
        self,
        batch: Batch,
        traces: Sequence[RankTrace],
        calls: Sequence[Sequence[CollectiveCall]],
    ) -> Sequence[Comparison]:
        """What ``check`` compares of arithmetic, to be entered again with other values."""
        kept = self._checked(self.subject(batch, traces), calls, keep=True)[0].kept
        return kept or ()

    def check_rerun(
        self,
        first: Subject,
        again: Sequence[RankTrace],
        ledger: Ledger,
    ) -> None:
        """Enter where two forwards of the same tokens differ in a bit.

        Args:
            first: the earlier one.
            again: traces of the later one.
            ledger: of the later one.
        """
        check_rerun(first, self.subject(first.batch, again), ledger)
        ledger.sort()

    def diagnose(
        self,
        batch: Batch,
        traces: Sequence[RankTrace],
        ledger: Ledger,
        earlier: tuple[Batch, Sequence[RankTrace]] | None = None,
    ) -> Mapping[Deviation, Diagnosis]:
        """What kind of mistake each deviation looks like; nothing is computed where there is none.

        Args:
            batch: what went into the forward.
            traces: one a rank.
            ledger: of that forward, with every deviation entered.
            earlier: the forward before on the same buffers, if there was one.
        """
        if not ledger.deviations:
            return {}
        scene = Scene(
            subject=self.subject(batch, traces),
            weights=self._judged_weights(traces),
            ledger=ledger,
            earlier=None if earlier is None else self.subject(*earlier),
        )
        return diagnose(scene)

    def forget_weights(self) -> None:
        """Let go of all decoded weights; a forward to come has them compared and decoded again."""
        self._weights = self._ideal_weights = self._nominal = None
        self._weights_ledger = Ledger(blinded=self._blinded)

    def subject(self, batch: Batch, traces: Sequence[RankTrace]) -> Subject:
        """The traces with their rows mapped.

        Raises:
            UnreadableTraceError: see ``judge``.
        """
        check_readable(self._layer, self._view, traces)
        return Subject(self._layer, self._view, batch, traces)

    @cached_property
    def _view(self) -> FormatView:
        """What the dispatch format promises, of a layer whose plan is sound."""
        check_plan(self._layer)
        return view_of(self._layer)

    def certain_values(self, subject: Subject, same_recipe: GoldenTokens) -> CertainValues | None:
        """What the certificate of a judged forward leaves no choice about; None in other modes.

        Args:
            subject: the forward, as ``subject`` maps it.
            same_recipe: its golden, as ``judge`` had it.
        """
        if self._layer.widths is None or not len(subject.hidden_states):
            return None
        return certain_values(*certified_forward(subject, self._reference(subject, same_recipe)))

    def _checked(
        self,
        subject: Subject,
        calls: Sequence[Sequence[CollectiveCall]] | None,
        *,
        keep: bool = False,
    ) -> tuple[Ledger, Tensor]:
        """Every check in order, and [all layer rows] bool: rows whose chosen experts are legal."""
        weights = self._judged_weights(subject.traces)
        ledger = self._weights_ledger.copy()
        ledger.kept = [] if keep else None
        check_accounts(subject, calls, ledger)
        check_contracts(subject, ledger)
        check_glue_in(subject, ledger)
        legal = check_route(subject, weights, ledger)
        check_dispatch(subject, ledger)
        check_pre_permute(subject, ledger)
        check_gemm1(subject, weights, ledger)
        check_activation(subject, ledger)
        check_gemm2(subject, weights, ledger)
        with where_captured(ledger, Stage.POST_PERMUTE, BAND, MOVES):
            subject.view.check_post_permute(subject, ledger)
        with where_captured(ledger, Stage.COMBINE, BAND, MOVES):
            subject.view.check_combine(subject, ledger)
        check_tail(subject, weights, ledger)
        check_glue_out(subject, weights, ledger)
        check_distribution(ledger)
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

    def _noise(
        self, subject: Subject, golden: GoldenTrace, num_twins: int
    ) -> Sequence[NoiseOfStage]:
        """What twins of a golden forward of the run's own routes differ by."""
        weights = self._judged_weights(subject.traces).golden
        twins = Twins(layer=self._layer, model=golden_model(self._layer), weights=weights)
        return twins.noise(subject.batch, golden, ep_ranks_of(subject), num_twins)

    def _goldens(
        self, subject: Subject, weights: JudgedWeights, legal: Tensor, ep_ranks: Tensor
    ) -> tuple[GoldenTrace, GoldenTrace]:
        """Ideal and same-recipe forward of the same tokens; routes are kept in fewer bytes."""
        batch = subject.batch
        pins = {"topk_ids": batch.topk_ids, "topk_weights": batch.topk_weights}
        ideal = golden_of(self._layer, batch, self._ideal(), rounding=False, **pins)
        run = first_rows(subject)
        run_ids = subject.layer_tensor(Stage.ROUTE, "topk_ids").to(torch.int64)[run]
        pins["topk_ids"] = torch.where(legal[run][:, None], run_ids, ideal.topk_ids)
        pins["ep_ranks"] = ep_ranks
        return ideal, golden_of(self._layer, batch, weights.golden, rounding=True, **pins)

    def _certified(
        self, subject: Subject, same_recipe: GoldenTrace, ledger: Ledger
    ) -> CertificateFacts | None:
        """The certificate and the exact check, where inputs are meant to be exact."""
        if self._layer.widths is None:
            return None
        facts = certify(subject, self._reference(subject, same_recipe), same_recipe, ledger)
        ledger.sort()
        return facts

    def _reference(self, subject: Subject, same_recipe: GoldenTokens) -> Reference:
        layer = self._layer
        if self._nominal is None:
            prepared = self._judged_weights(subject.traces).golden
            self._nominal = NominalWeights(self._ideal(), prepared, layer.scale_format)
        return Reference(
            model=golden_model(layer),
            weights=self._nominal,
            golden=same_recipe,
            ep_ranks=ep_ranks_of(subject),
        )
