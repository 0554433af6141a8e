"""A scenario whose ranks, judges and reference live on: the second run of it is the warm one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from actors.determinism import LivingLayer, ask_determinism, mode_to_ask
from actors.machine import device_of
from actors.rank_program import RankReport
from actors.reference import SimplestOther
from actors.resolve import ResolvedScenario
from actors.result_rows import ModeRun
from actors.rounds import batch_of_round, compare_rounds, diagnose_rounds
from actors.world import World
from moe.batch import Batch
from moe.devices import on_device
from moe.faults import blinded_checks, edit_golden
from reports.result import Mode
from reports.verdict.judge import Judge
from reports.verdict.twins import NUM_TWINS
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Round:
    """What goes into one forward."""

    mode: Mode
    number: int
    batch: Batch


def rounds_of(loaded: LoadedScenario) -> list[Round]:
    """Every forward of every mode, in order.

    Raises:
        UserError: captured inputs that do not fit.
    """
    scenario = loaded.scenario
    device = torch.device(device_of(scenario).name)
    batches = {mode: on_device(batch_of(loaded, mode), device) for mode in scenario.inputs.modes}
    return [
        Round(mode=Mode(mode), number=number, batch=batch_of_round(batch, number))
        for mode, batch in batches.items()
        for number in range(scenario.run.rounds)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class LivingScenario:
    """The parts of a run, in the order in which they are called; each may be called again.

    loaded    the scenario
    resolved  its plans and faults
    inputs    every forward of every mode, in order
    world     its ranks
    """

    loaded: LoadedScenario
    resolved: ResolvedScenario
    inputs: Sequence[Round]
    world: World

    @cached_property
    def judges(self) -> Mapping[str, Judge]:
        """A judge for each mode; modes with one layer share it, since it keeps decoded weights."""
        faults, layers = self.resolved.faults, self.resolved.layers
        blinded = blinded_checks(faults)
        by_layer = {
            layer.plan.fingerprint(): Judge(edit_golden(layer.judged, faults), blinded)
            for layer in layers.values()
        }
        return {mode: by_layer[layer.plan.fingerprint()] for mode, layer in layers.items()}

    @cached_property
    def _reference(self) -> SimplestOther:
        return SimplestOther(self.loaded)

    @property
    def modes(self) -> list[Mode]:
        """In the order of the scenario."""
        return list(dict.fromkeys(one.mode for one in self.inputs))

    def forwards(self) -> list[list[RankReport]]:
        """Of ``inputs``, on every rank.

        Raises:
            WorldFailedError: a rank raised, died or hung.
        """
        return [self._forward(one) for one in self.inputs]

    def forwards_of(self, mode: Mode) -> list[list[RankReport]]:
        """``forwards`` of one mode alone."""
        return [self._forward(one) for one in self._rounds(mode)]

    def _rounds(self, mode: Mode) -> list[Round]:
        return [one for one in self.inputs if one.mode is mode]

    def _forward(self, one: Round) -> list[RankReport]:
        """One forward on every rank, of its mode's layer."""
        plan = self.resolved.layers[one.mode].plan
        self.world.use(plan)
        given = deal(one.batch, plan.sync, plan.seed)
        return self.world.forward(given, self.loaded.scenario.run.timeout_s)

    def judged(
        self,
        reports: Sequence[Sequence[RankReport]],
        judges: Mapping[str, Judge],
        num_twins: int = NUM_TWINS,
    ) -> tuple[ModeRun, ...]:
        """What the checks say of ``forwards``.

        Args:
            reports: what each of them left, rank by rank.
            judges: by mode.
            num_twins: of the golden, in the first round of modes whose sums round.

        Raises:
            UnreadableTraceError: a trace lacks a tensor, or has one of another shape.
        """
        in_order = iter(reports)
        return tuple(
            run
            for mode in self.modes
            for run in self.judged_mode(
                mode, [next(in_order) for _ in self._rounds(mode)], judges[mode], num_twins
            )
        )

    def judged_mode(
        self, mode: Mode, reports: Sequence[Sequence[RankReport]], judge: Judge, num_twins: int
    ) -> list[ModeRun]:
        """``judged`` of one mode alone."""
        runs = [
            _judged(one, ranks, judge, num_twins)
            for one, ranks in zip(self._rounds(mode), reports, strict=True)
        ]
        compare_rounds(judge, runs)
        return runs

    def asked(self, runs: tuple[ModeRun, ...], judges: Mapping[str, Judge]) -> tuple[ModeRun, ...]:
        """The runs, those of the mode that is asked about determinism with its answers.

        Raises:
            WorldFailedError: ranks that had come back did not do so again.
        """
        mode = mode_to_ask(runs)
        if mode is None:
            return runs
        of_mode = [run for run in runs if run.mode is mode]
        asked = iter(self.asked_mode((), of_mode, judges[mode]))
        return tuple(next(asked) if run.mode is mode else run for run in runs)

    def asked_mode(
        self, before: Sequence[ModeRun], rounds: list[ModeRun], judge: Judge
    ) -> list[ModeRun]:
        """The rounds of the mode that is asked about determinism, with answers if nothing is wrong.

        Args:
            before: judged forwards of other modes; their traces may be gone.
            rounds: of the mode.
            judge: of the mode.
        """
        mode = rounds[0].mode
        if mode_to_ask([*before, *rounds]) is not mode:
            return rounds
        living = LivingLayer(
            loaded=self.loaded,
            layer=self.resolved.layers[mode],
            judge=judge,
            world=self.world,
            reference=self._reference,
        )
        return ask_determinism(living, rounds)


def diagnosed(runs: Sequence[ModeRun], judges: Mapping[str, Judge]) -> tuple[ModeRun, ...]:
    """The runs with a diagnosis for whatever is wrong."""
    by_mode = groupby(runs, key=lambda run: run.mode)
    return tuple(
        run for mode, rounds in by_mode for run in diagnose_rounds(judges[mode], list(rounds))
    )


def _judged(one: Round, ranks: Sequence[RankReport], judge: Judge, num_twins: int) -> ModeRun:
    """One forward with its verdict; twins show the noise of a mode's first round."""
    traces = [report.trace for report in ranks]
    calls = [report.calls for report in ranks]
    twins = 0 if one.number or one.mode is Mode.EXACT else num_twins
    return ModeRun(
        mode=one.mode,
        round=one.number,
        batch=one.batch,
        reports=ranks,
        judgement=judge.judge(one.batch, traces, calls, twins),
    )
