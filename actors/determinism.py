"""Forwards beside the judged ones: do tokens keep their bits again, in another batch, elsewhere?

They are compared bit by bit, not judged, and only where nothing is wrong already: what is wrong
may depend on anything. One mode is asked, whose sums round if any mode's do: exact inputs show no
order, so that bits which stay the same there answer nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from actors.rank_program import RankReport
from actors.reference import SimplestOther, ask_of_topology
from actors.resolve import ResolvedLayer
from actors.result_rows import Answer, ModeRun
from actors.rounds import batch_of_round, list_b, tokens_of
from actors.world import World
from moe.batch import Batch
from moe.formats import Stage
from moe.trace import RankTrace
from reports.result import CheckVerdict, Mode
from reports.verdict.determinism import BATCH, RERUN, TOPOLOGY, check_batch, last_stage_of_batch
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from reports.verdict.subject import Subject
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario
from scenarios.parallel import sync_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LivingLayer:
    """A scenario's layer in one mode, with its judge, on ranks that still live.

    reference  the same tokens elsewhere
    """

    loaded: LoadedScenario
    layer: ResolvedLayer
    judge: Judge
    world: World
    reference: SimplestOther

    def forward(self, batch: Batch, layer: ResolvedLayer) -> list[RankReport]:
        """One more forward of the layer; ``layer`` may deal its rows out otherwise."""
        self.world.use(layer.plan)
        given = deal(batch, layer.plan.sync, layer.plan.seed)
        return self.world.forward(given, self.loaded.scenario.run.timeout_s)


def mode_to_ask(runs: Sequence[ModeRun]) -> Mode | None:
    """The first mode whose sums round, or exact mode where it is the only one.

    None where something is wrong, or where no token is.
    """
    if any(run.judgement.ledger.deviations or run.judgement.ledger.blinded for run in runs):
        return None
    is_there = len(runs[0].batch.hidden_states)
    return asks_last(dict.fromkeys(run.mode for run in runs))[-1] if is_there else None


def asks_last(modes: Iterable[Mode]) -> list[Mode]:
    """Modes with the one behind all others that is asked, if any is: what is wrong is known then.

    Args:
        modes: in the order of the scenario.
    """
    first, *others = sorted(modes, key=lambda mode: mode is Mode.EXACT)
    return [*others, first]


def ask_determinism(living: LivingLayer, rounds: Sequence[ModeRun]) -> list[ModeRun]:
    """Ask all three questions of a mode; what loses its bits is entered in its first ledger.

    The forwards that the rounds lack are run: list B, list A again (whose padding is filled
    otherwise, and which reads what B left), and one token alone; each is gone when the next comes.

    Args:
        living: the layer in that mode.
        rounds: its judged forwards, in which nothing is wrong.

    Returns:
        The rounds, the first one with the answers.

    Raises:
        WorldFailedError: ranks that had come back did not do so again.
    """
    first, ledger = rounds[0], rounds[0].judgement.ledger
    subject = living.judge.subject(first.batch, _traces(first.reports))
    among_others = _ask_of_other_list(living, rounds, subject)
    acted = among_others.acted
    if len(rounds) < 3:
        again = living.forward(first.batch, living.layer)
        acted |= _acted(again)
        living.judge.check_rerun(subject, _traces(again), ledger)
        del again
    answers = {}
    if not ledger.deviations:
        answers[BATCH], alone_acted = _ask_of_batch(living, first, subject, among_others)
        acted |= alone_acted
    if not ledger.deviations:
        answers[TOPOLOGY] = ask_of_topology(living.reference, first.mode, subject, ledger)
    if first.mode is Mode.EXACT:
        answers = dict.fromkeys((RERUN, BATCH, TOPOLOGY), _SHOWS_NO_ORDER)
    return [replace(first, answers=answers, also_acted=acted), *rounds[1:]]


_SHOWS_NO_ORDER: Final = Answer(
    verdict=CheckVerdict.NOT_APPLICABLE,
    detail="no bit was lost, but exact inputs give every order of a sum the same bits; add random "
    "to inputs.modes",
)
"""Of forwards of exact inputs that have lost nothing."""


def _traces(reports: Sequence[RankReport]) -> list[RankTrace]:
    return [report.trace for report in reports]


def _acted(reports: Sequence[RankReport]) -> frozenset[str]:
    return frozenset[str]().union(*(report.acted for report in reports))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _AmongOthers:
    """What became of the tokens in list B.

    lost      has what they lost there
    is_moved  whether a token was on another rank
    acted     faults that changed something in that forward
    """

    lost: Ledger
    is_moved: bool
    acted: frozenset[str]


def _ask_of_other_list(
    living: LivingLayer, rounds: Sequence[ModeRun], subject: Subject
) -> _AmongOthers:
    """Compare list B with the list: the second round, or a forward that is not judged."""
    batch, lost = rounds[0].batch, Ledger()
    if len(rounds) > 1:
        others = rounds[1].reports
    else:
        others = living.forward(batch_of_round(batch, 1), living.layer)
    order = list_b(len(batch.hidden_states))
    other = living.judge.subject(tokens_of(batch, order), _traces(others))
    check_batch(subject, other, order, lost)
    is_moved = _are_elsewhere(subject, other, order)
    return _AmongOthers(lost=lost, is_moved=is_moved, acted=_acted(others))


def _ask_of_batch(
    living: LivingLayer, first: ModeRun, subject: Subject, among_others: _AmongOthers
) -> tuple[Answer, frozenset[str]]:
    """Compare the middle token alone with the list, too; and what acted on that one.

    What is lost is entered, unless the backend promises nothing.
    """
    lost, acted = among_others.lost, frozenset[str]()
    if not lost.deviations:
        order = torch.tensor([len(first.batch.hidden_states) // 2])
        layer, batch = _dealt_alone(living, int(order)), tokens_of(first.batch, order)
        reports = living.forward(batch, layer)
        acted = _acted(reports)
        alone = Judge(layer.judged).subject(batch, _traces(reports))
        check_batch(subject, alone, order, lost)
    if subject.layer.arithmetic.rows_stand_alone:
        first.judgement.ledger.take(lost)
    return _answer_of_batch(subject, lost, moved=among_others.is_moved), acted


def _dealt_alone(living: LivingLayer, token: int) -> ResolvedLayer:
    """The same layer for one token, which stays in its attention-DP group; the others are idle."""
    scenario, layer = living.loaded.scenario, living.layer
    counts, seen = [], 0
    for count in scenario.batch.tokens:
        counts.append(int(seen <= token < seen + count))
        seen += count
    padding = "auto" if len(counts) == 1 else str(layer.plan.sync.padding)
    batch = scenario.batch.model_copy(update={"tokens": tuple(counts), "padding": padding})
    sync = sync_of(scenario.model_copy(update={"batch": batch}))
    return ResolvedLayer(
        plan=replace(layer.plan, sync=sync),
        judged=replace(layer.judged, sync=sync, tokens=tuple(counts)),
    )


def _are_elsewhere(first: Subject, other: Subject, source: Tensor) -> bool:
    """Whether any token enters on other ranks; where all ranks have all tokens, none can.

    Args:
        first: a forward of the whole list.
        other: a forward of tokens of that list.
        source: [tokens of ``other``] int64: which token of the list each of them is.
    """
    return any(
        not torch.equal(torch.isin(source, before), torch.isin(torch.arange(len(source)), now))
        for before, now in zip(first.own_tokens, other.own_tokens, strict=True)
    )


def _answer_of_batch(subject: Subject, ledger: Ledger, *, moved: bool) -> Answer:
    """What was compared; or, where the backend promises nothing, what was seen.

    Args:
        subject: the list.
        ledger: has what was lost.
        moved: whether a token was on another rank among others.
    """
    if len(subject.hidden_states) == 1:
        detail = "there is one token, which is alone in every batch"
        return Answer(verdict=CheckVerdict.NOT_APPLICABLE, detail=detail)
    if not subject.layer.arithmetic.rows_stand_alone:
        lost = min(ledger.deviations, key=lambda deviation: deviation.blame, default=None)
        seen = f"lost first in {lost.stage} on rank {lost.rank}" if lost else "none was lost here"
        detail = f"the GEMM backend does not promise that a row's bits are its own; {seen}"
        return Answer(verdict=CheckVerdict.NOT_APPLICABLE, detail=detail)
    last = last_stage_of_batch(subject)
    where = "on other ranks" if moved else "in other rows of the same ranks, which all have them"
    detail = f"tokens have the same bits among others {where}, and one alone, up to {last}"
    if last is not Stage.GLUE_OUT:
        detail += "; behind it their sums are cut by which replica serves which row"
    return Answer(verdict=CheckVerdict.AGREE, detail=detail)
