"""Judges a forward of which only a trace is left, whole or in part, whoever computed it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.golden import GoldenTrace, golden_forward
from moe.trace import RankTrace
from reports.verdict.captured import NotCapturedError, as_captured, unread_tensors
from reports.verdict.deviation import NotAsked
from reports.verdict.end_to_end import EndToEnd, measure
from reports.verdict.exact_compared import EXACT
from reports.verdict.format_views import view_of
from reports.verdict.golden_model import golden_model
from reports.verdict.goldens import ep_ranks_of
from reports.verdict.judge import Judge
from reports.verdict.judgement import Judgement
from reports.verdict.layer import JudgedLayer
from reports.verdict.plan_check import check_plan
from reports.verdict.subject import Subject
from reports.verdict.twins import NUM_TWINS, NoiseOfStage
from topology.sync import PADDING


class CapturedJudge(Judge):
    """See ``Judge``; a check that asks for what was not captured is put aside.

    Collectives are no part of a trace, so the calls and bytes that are due are not asked for.
    """

    unread: tuple[str, ...] = ()
    """Tensors of the last trace that no check has asked for."""

    def judge_captured(self, batch: Batch, traces: Sequence[RankTrace]) -> Judgement:
        """Run every check that finds its tensors.

        Args:
            batch: the global token list; of zero columns where nobody knows it.
            traces: one a rank, in rank order, of tensors that ``check_form`` has no objection to.

        Returns:
            The judgement; goldens and outputs are of no token where the trace lacks tokens.

        Raises:
            UnreadableTraceError: rows that cannot be mapped to tokens.
        """
        subject = self.subject(batch, traces)
        captured = subject.traces
        ledger, legal = self._checked(subject, None)
        self.unread = unread_tensors(captured)
        weights = self._judged_weights(captured)
        hashed = self._layer.routing.hashed
        known = bool(batch.hidden_states.shape[1]) and (batch.input_ids is not None or not hashed)
        ideal, same_recipe = self._captured_goldens(subject, legal if known else None)
        end_to_end = EndToEnd(worst_row={}, distances={})
        certificate = None
        if known and _has_routes(subject):
            certificate = self._certified(subject, same_recipe, ledger)
        elif self._layer.widths is not None:
            ledger.put_aside(NotAsked(check=EXACT, what="every stage", why=_lacks(known)))
        return Judgement(
            ledger=ledger,
            certificate=certificate,
            ideal=ideal.of_tokens,
            same_recipe=same_recipe.of_tokens,
            end_to_end=measure(subject, same_recipe, ideal) if known else end_to_end,
            noise=self._captured_noise(subject, same_recipe) if known else (),
            calls_due=(),
            weight_changes=self._changes_of_weights(weights),
            topk_ids=_of_tokens(subject, Stage.ROUTE, "topk_ids"),
            topk_weights=_of_tokens(subject, Stage.ROUTE, "topk_weights"),
            output=_of_tokens(subject, Stage.GLUE_OUT, "hidden_states"),
        )

    def subject(self, batch: Batch, traces: Sequence[RankTrace]) -> Subject:
        """The traces with their rows mapped, whatever they lack."""
        check_plan(self._layer)
        return Subject(self._layer, view_of(self._layer), batch, as_captured(traces))

    def _captured_goldens(
        self, subject: Subject, legal: Tensor | None
    ) -> tuple[GoldenTrace, GoldenTrace]:
        """Ideal and same-recipe forward, on the run's routes if these were captured.

        Args:
            subject: the forward.
            legal: [all layer rows] bool, rows of legal routes; None: no token is known.
        """
        weights, batch = self._judged_weights(subject.traces), subject.batch
        if legal is None:
            hidden_size = self._layer.hidden_size
            batch = Batch(hidden_states=batch.hidden_states.new_zeros(0, hidden_size))
        elif _has_routes(subject):
            return self._goldens(subject, weights, legal, ep_ranks_of(subject))
        model, pins = golden_model(self._layer), (batch.topk_ids, batch.topk_weights)
        ideal, same_recipe = (
            golden_forward(
                model,
                of,
                batch.hidden_states,
                rounding=rounding,
                input_ids=_ids_of(batch, self._layer),
                topk_ids=pins[0],
                topk_weights=pins[1],
            )
            for of, rounding in ((self._ideal(), False), (weights.golden, True))
        )
        return ideal, same_recipe

    def _captured_noise(self, subject: Subject, golden: GoldenTrace) -> Sequence[NoiseOfStage]:
        """Of the default number of twins, where the trace says who computed which route."""
        return self._noise(subject, golden, NUM_TWINS) if _has_routes(subject) else ()


def _has_routes(subject: Subject) -> bool:
    """Whether the trace says which experts each token went to, and on which slots."""
    return "topk_ids" in subject.stage(Stage.ROUTE, 0) and "physical_ids" in subject.stage(
        Stage.DISPATCH, 0
    )


def _lacks(known: bool) -> str:
    """What a certificate would need."""
    if not known:
        return "glue_in/own was not captured, and no token can be certified"
    return "a certificate takes both route/topk_ids and dispatch/physical_ids"


def _ids_of(batch: Batch, layer: JudgedLayer) -> Tensor | None:
    """Vocabulary ids of the batch; those of no token, for a hashed layer, are none."""
    if batch.input_ids is None and layer.routing.hashed:
        return torch.zeros(len(batch.hidden_states), dtype=torch.int64)
    return batch.input_ids


def _of_tokens(subject: Subject, stage: Stage, name: str) -> Tensor:
    """One tensor in global token order, or no rows of it."""
    try:
        return subject.of_tokens(stage, name)
    except NotCapturedError:
        return torch.zeros(0, 0)


def tokens_of(layer: JudgedLayer, traces: Sequence[RankTrace], pinned: Batch) -> Batch:
    """The tokens that a trace started from, each from the first rank that holds it.

    Args:
        layer: facts of the layer.
        traces: one a rank, in rank order.
        pinned: what else is known of them: routes that were given.

    Returns:
        ``pinned`` with the tokens of ``glue_in/own``; those of zero columns if that was not
        captured.
    """
    captured, num_tokens = as_captured(traces), sum(layer.tokens)
    try:
        own = [trace[Stage.GLUE_IN]["own"] for trace in captured]
        hidden_states = _in_global_order(layer.sync.entry, own, num_tokens)
    except NotCapturedError:
        hidden_states = torch.zeros(num_tokens, 0, dtype=torch.bfloat16)
    ids = None
    if layer.routing.hashed:
        try:
            held = [trace[Stage.GLUE_IN]["input_ids"] for trace in captured]
            ids = _in_global_order(layer.sync.layer, held, num_tokens).to(torch.int64)
        except NotCapturedError:
            ids = None
    return replace(pinned, hidden_states=hidden_states, input_ids=ids)


def _in_global_order(
    rows: Sequence[Sequence[int]], tensors: Sequence[Tensor], num_tokens: int
) -> Tensor:
    """[T, ...] from rows that stand for these tokens on each rank."""
    gathered = tensors[0].new_zeros(num_tokens, *tensors[0].shape[1:])
    for tokens, tensor in reversed([*zip(rows, tensors, strict=True)]):
        token = torch.tensor(tokens, dtype=torch.int64)
        gathered[token[token != PADDING]] = tensor[token != PADDING]
    return gathered
