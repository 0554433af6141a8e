"""One call of a rank's collectives answered in another way: which one, and how.

The call is number ``occurrence`` of the verb ``op`` in a forward. Calls that carry rows count;
vectors do not: token ids, and the comparison of plans before the first forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from moe.dispatch import deepep_normal, deepep_v2, flashinfer, low_latency, standard
from moe.faults.bits import same_bits
from moe.faults.kinds import FaultContext, Params, Plan
from moe.formats import DispatchFormat, Phase, Stage
from topology.collectives import Collectives, ForwardingCollectives
from topology.mesh import Group
from topology.sync_calls import Carried, collective_calls

VERBS: Final = ("all_gather_v", "all_to_all_v", "all_reduce", "reduce_scatter_v")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """One collective as a rank means to make it.

    counts       rows of each member; of an all-to-all, rows for each member
    recv_counts  of an all-to-all, rows from each member
    place        this rank's place in the group
    """

    op: str
    rows: Tensor
    group: Group
    place: int
    counts: Sequence[int] = ()
    recv_counts: Sequence[int] = ()

    def on(self, collectives: Collectives) -> Tensor:
        """Make the call."""
        match self.op:
            case "all_gather_v":
                return collectives.all_gather_v(self.rows, self.counts, self.group)
            case "all_to_all_v":
                return collectives.all_to_all_v(
                    self.rows, self.counts, self.recv_counts, self.group
                )
            case "all_reduce":
                return collectives.all_reduce(self.rows, self.group)
            case _:
                return collectives.reduce_scatter_v(self.rows, self.counts, self.group)

    @property
    def num_received(self) -> int:
        """Rows that come back."""
        match self.op:
            case "all_gather_v":
                return sum(self.counts)
            case "all_to_all_v":
                return sum(self.recv_counts)
            case "all_reduce":
                return self.rows.shape[0]
            case _:
                return self.counts[self.place]


Answer = Callable[[Call, Collectives, FaultContext], Tensor]
"""What a rank gets instead: the call it means to make, the verbs it has, what it may look at."""


class TamperedCollectives(ForwardingCollectives):
    """Hands collectives on, but answers one call of a forward in another way."""

    def __init__(self, inner: Collectives, context: FaultContext, answer: Answer) -> None:
        super().__init__(inner)
        self._context = context
        self._answer = answer
        self._calls = 0

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        return self._made("all_gather_v", rows, group, counts)

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """See ``Collectives``."""
        return self._made("all_to_all_v", rows, group, send_counts, recv_counts)

    def all_reduce(self, rows: Tensor, group: Group) -> Tensor:
        """See ``Collectives``."""
        return self._made("all_reduce", rows, group)

    def reduce_scatter_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        return self._made("reduce_scatter_v", rows, group, counts)

    def _made(
        self,
        op: str,
        rows: Tensor,
        group: Group,
        counts: Sequence[int] = (),
        recv_counts: Sequence[int] = (),
    ) -> Tensor:
        call = Call(
            op=op,
            rows=rows,
            group=group,
            place=group.index(self.rank),
            counts=counts,
            recv_counts=recv_counts,
        )
        if self._is_meant(call):
            return self._answer(call, self._inner, self._context)
        return call.on(self._inner)

    def _is_meant(self, call: Call) -> bool:
        if call.op != self._context.params["op"] or call.rows.dim() == 1:
            return False
        occurrence, self._calls = self._calls, self._calls + 1
        return occurrence == self._context.params["occurrence"]


Change = Callable[[Tensor, Call, FaultContext], Tensor]
"""What a rank makes of what it got by a call."""


def tampering(answer: Answer) -> Callable[[Collectives, FaultContext], Collectives]:
    """Around a rank's verbs: one call is answered so."""
    return lambda collectives, context: TamperedCollectives(collectives, context, answer)


def altered(change: Change) -> Answer:
    """The call as it is due, then the change."""

    def answer(call: Call, inner: Collectives, context: FaultContext) -> Tensor:
        received = call.on(inner)
        changed = change(received, call, context)
        if not same_bits(received, changed):
            context.changed()
        return changed

    return answer


def _flashinfer_calls(plan: Plan) -> Sequence[tuple[Stage, str]]:
    """Prefill gathers, decode writes."""
    is_extend = plan.phase is Phase.EXTEND
    return flashinfer.EXTEND_COLLECTIVES if is_extend else flashinfer.DECODE_COLLECTIVES


CALLS_OF_FORMAT: Final[Mapping[DispatchFormat, Callable[[Plan], Sequence[tuple[Stage, str]]]]] = (
    MappingProxyType(
        {
            DispatchFormat.STANDARD: lambda plan: standard.COLLECTIVES,
            DispatchFormat.FLASHINFER: _flashinfer_calls,
            DispatchFormat.DEEPEP_NORMAL: lambda plan: deepep_normal.COLLECTIVES,
            DispatchFormat.DEEPEP_LL: lambda plan: low_latency.COLLECTIVES,
            DispatchFormat.MOONCAKE: lambda plan: low_latency.COLLECTIVES,
            DispatchFormat.NIXL: lambda plan: low_latency.COLLECTIVES,
            DispatchFormat.DEEPEP_V2: lambda plan: deepep_v2.COLLECTIVES,
        }
    )
)
"""What a dispatcher calls in a forward, in order."""


def stage_of_call(plan: Plan, params: Params) -> Stage:
    """Stage of the call that ``op`` and ``occurrence`` name under a plan.

    Raises:
        ValueError: the topology makes no such call.
    """
    calls = [
        (Stage(call.stage), call.op)
        for call in collective_calls(plan.sync, plan.layout, 0, fp8_wire=plan.gathers_fp8)
        if call.carries is not Carried.INPUT_IDS
    ]
    calls += CALLS_OF_FORMAT[plan.dispatch_format](plan)
    calls.sort(key=lambda call: call[0].position)
    stages = [stage for stage, op in calls if op == params["op"]]
    if int(params["occurrence"]) >= len(stages):
        raise ValueError(f"{len(stages)} calls of {params['op']}, no {params['occurrence']}")
    return stages[int(params["occurrence"])]
