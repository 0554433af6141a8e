"""Forwards beside the judged ones: do tokens keep their bits again, in another batch, elsewhere?

They are compared bit by bit, not judged, and only where nothing is wrong already: what is wrong
may depend on anything. One mode is asked, whose sums round: in exact mode no order shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

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
from reports.verdict.determinism import BATCH, TOPOLOGY, check_batch, last_stage_of_batch
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
    """The first mode whose sums round; None where something is wrong, or where no token is."""
    if any(run.judgement.ledger.deviations or run.judgement.ledger.blinded for run in runs):
        return None
    modes = sorted((run.mode for run in runs), key=lambda mode: mode is Mode.EXACT)
    return modes[0] if len(runs[0].batch.hidden_states) else None


def ask_determinism(living: LivingLayer, rounds: Sequence[ModeRun]) -> list[ModeRun]:
    """Ask all three questions of a mode; what loses its bits is entered in its first ledger.

    The forwards that the rounds lack are run: list B, list A again (whose padding is filled
    otherwise, and which reads what B left), and one token alone.

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
    others = _other_list(living, rounds)
    acted = _acted(others)
    if len(rounds) < 3:
        again = living.forward(first.batch, living.layer)
        acted |= _acted(again)
        living.judge.check_rerun(first.batch, _traces(first.reports), _traces(again), ledger)
        del again
    answers = {}
    if not ledger.deviations:
        answers[BATCH], alone_acted = _ask_of_batch(living, first, subject, others)
        acted |= alone_acted
    if not ledger.deviations:
        answers[TOPOLOGY] = ask_of_topology(living.reference, first.mode, subject, ledger)
    answered = replace(
        first, answers=answers, also_acted=acted if ledger.deviations else frozenset()
    )
    return [answered, *rounds[1:]]


def _traces(reports: Sequence[RankReport]) -> list[RankTrace]:
    return [report.trace for report in reports]


def _acted(reports: Sequence[RankReport]) -> frozenset[str]:
    return frozenset[str]().union(*(report.acted for report in reports))


def _other_list(living: LivingLayer, rounds: Sequence[ModeRun]) -> Sequence[RankReport]:
    """The forward of list B: the second round, or one that is not judged."""
    if len(rounds) > 1:
        return rounds[1].reports
    return living.forward(batch_of_round(rounds[0].batch, 1), living.layer)


def _ask_of_batch(
    living: LivingLayer, first: ModeRun, subject: Subject, others: Sequence[RankReport]
) -> tuple[Answer, frozenset[str]]:
    """Compare list B with the list, then the middle token alone; and what acted on that one.

    What is lost is entered, unless the backend promises nothing.
    """
    promised = subject.layer.arithmetic.rows_stand_alone
    ledger = first.judgement.ledger if promised else Ledger()
    order = list_b(len(first.batch.hidden_states))
    other = living.judge.subject(tokens_of(first.batch, order), _traces(others))
    check_batch(subject, other, order, ledger)
    acted = frozenset[str]()
    if not ledger.deviations:
        order = torch.tensor([len(first.batch.hidden_states) // 2])
        layer, batch = _dealt_alone(living, int(order)), tokens_of(first.batch, order)
        reports = living.forward(batch, layer)
        acted = _acted(reports)
        alone = Judge(layer.judged).subject(batch, _traces(reports))
        check_batch(subject, alone, order, ledger)
    return _answer_of_batch(subject, ledger), acted


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


def _answer_of_batch(subject: Subject, ledger: Ledger) -> Answer:
    """What was compared; or, where the backend promises nothing, what was seen."""
    if not subject.layer.arithmetic.rows_stand_alone:
        lost = min(ledger.deviations, key=lambda deviation: deviation.blame, default=None)
        seen = f"lost first in {lost.stage} on rank {lost.rank}" if lost else "none was lost here"
        detail = f"the GEMM backend does not promise that a row's bits are its own; {seen}"
        return Answer(verdict=CheckVerdict.NOT_APPLICABLE, detail=detail)
    last = last_stage_of_batch(subject)
    detail = f"tokens have the same bits among others on other ranks, and one alone, up to {last}"
    if last is not Stage.GLUE_OUT:
        detail += "; behind it their sums are cut by which replica serves which row"
    return Answer(verdict=CheckVerdict.AGREE, detail=detail)
