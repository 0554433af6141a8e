"""The SPMD program of one rank: prepare weights once, run forwards. No Ray here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from actors.build import LoadedLayer, build_layer, load_layer, rank_weights
from actors.dispatchers import dispatch_buffers
from actors.gemm import gemm_backend
from actors.plan import LayerPlan
from moe.batch import LayerInput
from moe.devices import on_device
from moe.faults import ArmedFault, FaultTap, edit_plan, plan_edits, wrap_collectives
from moe.formats import Stage
from moe.lifetimes import ReleasingTap
from moe.poison import Fill, filled_with
from moe.tap import Tap
from moe.trace import RankTrace, RecordingTap
from moe.weights import LayerWeights
from topology.collectives import CollectiveCall, Collectives, RecordingCollectives

V = TypeVar("V")
_STAGES = tuple(Stage)


class PlanMismatchError(RuntimeError):
    """Ranks of one world were given different plans."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankReport:
    """What one rank brings home from one forward.

    trace    every stage's tensors
    calls    its collectives, in order
    acted    names of the injected faults that changed something on this rank
    seconds  of the forward alone
    """

    trace: RankTrace
    calls: tuple[CollectiveCall, ...]
    acted: frozenset[str]
    seconds: float


class RankProgram:
    """One rank of one layer.

    Args:
        rank: its number in the world.
        plan: the layer and its topology; equal on all ranks.
        faults: what is injected, for all ranks.
        progress: told whenever the rank gets to a stage or into a collective.
        prepare: makes what a rank holds under a plan.
    """

    def __init__(
        self,
        rank: int,
        plan: LayerPlan,
        faults: Sequence[ArmedFault] = (),
        progress: Callable[[str, str], None] | None = None,
        prepare: Callable[[LayerPlan, int], LayerWeights] = rank_weights,
    ) -> None:
        self.rank = rank
        self.stage = Stage.WEIGHTS
        self._faults = tuple(faults)
        self.deal_by(plan)
        self._progress = progress
        self._rank_weights = prepare
        num_slots = plan.num_experts + plan.redundant
        self._fault_tap = FaultTap(rank, plan.layout.world_size, faults, num_slots)
        self._gemm = gemm_backend(plan.gemm, plan.device)
        self._device = torch.device(plan.device)
        self._loaded: LoadedLayer | None = None
        self._weights_seen: RecordingTap | None = None
        self._buffers = dispatch_buffers(plan)
        self._forwards = 0

    def deal_by(self, plan: LayerPlan) -> None:
        """Let the next forwards have other rows; weights and buffers stay.

        Args:
            plan: of the same layer: it differs in who holds which rows alone.
        """
        self._plan = edit_plan(plan, self._faults, self.rank)
        self.given_plan = plan
        self._edited = plan_edits(plan, self._faults, self.rank)

    def forward(self, given: LayerInput, collectives: Collectives) -> RankReport:
        """One forward of this rank's rows.

        Args:
            given: the rank's rows, and what is pinned from outside.
            collectives: this rank's verbs, for this forward.

        Raises:
            PlanMismatchError: another rank was given another plan.
        """
        recording = RecordingCollectives(
            wrap_collectives(collectives, self._faults, self._fault_tap.acted), self._entered
        )
        loaded = self._prepare(recording)
        recorder = RecordingTap(earlier=self._weights_seen)
        here = on_device(given, self._device)
        start = time.perf_counter()
        layer = build_layer(self._plan, recording, self._gemm, loaded, self._buffers)
        self._reach(Stage.GLUE_IN)
        tap = self._tap(recorder)
        if self._other_fill():
            with filled_with(Fill.LARGE):
                layer.forward(here, ReleasingTap(tap))
        else:
            layer.forward(here, tap)
        seconds = time.perf_counter() - start
        assert self._weights_seen is not None
        stages = {**self._weights_seen.stages, **recorder.stages}
        return RankReport(
            trace=RankTrace(rank=self.rank, stages=stages),
            calls=tuple(recording.calls),
            acted=frozenset(self._fault_tap.acted | self._edited),
            seconds=seconds,
        )

    def _other_fill(self) -> bool:
        """Whether this forward's padding is filled otherwise, and tensors go after their last use.

        Two forwards as they are, two otherwise: when the token lists of the first two come again,
        whoever reads what nobody may reads something else.
        """
        self._forwards += 1
        return (self._forwards - 1) // 2 % 2 == 1

    def _prepare(self, collectives: RecordingCollectives) -> LoadedLayer:
        """Weights as the GEMMs read them; drawn, prepared and loaded on the first forward only."""
        self._reach(Stage.WEIGHTS)
        if self._loaded is None:
            self._agree_on_plan(collectives)
            self._weights_seen = RecordingTap()
            prepared = self._rank_weights(self._plan, self.rank)
            weights = self._tap(self._weights_seen)(Stage.WEIGHTS, prepared)
            self._loaded = load_layer(self._gemm, weights)
        return self._loaded

    def _agree_on_plan(self, collectives: Collectives) -> None:
        """Compare plans before anything is exchanged: unequal capacities hang later."""
        world = self._plan.layout.world
        number = self.given_plan.fingerprint()
        mine = torch.tensor([number], dtype=torch.int64, device=self._device)
        plans = collectives.all_gather_v(mine, [1] * len(world), world).tolist()
        differing = [rank for rank in world if plans[rank] != plans[0]]
        if differing:
            raise PlanMismatchError(f"ranks {differing} were given another plan than rank 0")

    def _tap(self, recorder: RecordingTap) -> Tap:
        """Faults first, so that what is recorded is what the next stage gets."""

        def tap(stage: Stage, value: V) -> V:
            with self._device:  # faults make their tensors where the rank has its own
                edited = self._fault_tap(stage, value)
            seen = recorder(stage, edited)
            self._reach(_after(stage))
            return seen

        return tap

    def _reach(self, stage: Stage) -> None:
        self.stage = stage
        self._say("")

    def _entered(self, op: str) -> str:
        """A collective begins: say so, and name the stage it belongs to."""
        self._say(op)
        return self.stage

    def _say(self, op: str) -> None:
        if self._progress is not None:
            self._progress(self.stage, op)


def _after(stage: Stage) -> Stage:
    return _STAGES[min(stage.position + 1, len(_STAGES) - 1)]
