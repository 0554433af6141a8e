"""Small loopback worlds of the low-latency mode, and whose the rows of their slabs are."""

import torch
from torch import Tensor

from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.low_latency import LowLatencyDispatcher
from moe.dispatched import LowLatencyDispatchOutput
from moe.formats import ScaleFormat
from moe.stages import CombineInput, CombineOutput, PhysicalIds
from topology.loopback import LoopbackWorld

LOCAL_EXPERTS = 2
CAPACITY = 4
Routes = list[list[list[int]]]
"""Expert ids by rank, token and slot; two experts a rank, -1 = dropped."""

ROUTES: Routes = [
    [[0, 1, 4], [2, 3, 5], [-1, 0, -1], [-1, -1, -1]],
    [],
    [[4, 5, -1], [0, 5, 2]],
    [[0, 1, 2]],
]
NOBODY: Routes = [[], [], [], []]
Held = list[MessageBuffers]


def new_buffers() -> Held:
    return [MessageBuffers(2) for _ in range(4)]


def hidden_of(rank: int, num_tokens: int, width: int = 4) -> Tensor:
    """[T, width] bf16 rows that say whose they are: 16 * rank + row, then 1, 2, ..."""
    rows = torch.arange(width).repeat(num_tokens, 1).to(torch.bfloat16)
    rows[:, 0] = torch.arange(num_tokens) + 16 * rank
    return rows


def dispatcher(
    verbs,
    held: Held,
    *,
    seed: int = 5,
    capacity: int = CAPACITY,
    wire: ScaleFormat = ScaleFormat.NONE,
) -> LowLatencyDispatcher:
    return LowLatencyDispatcher(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        capacity=capacity,
        wire_format=wire,
        buffers=held[verbs.rank],
        arrival_seed=seed + verbs.rank,
    )


def weights_of(mine: list[list[int]]) -> Tensor:
    return torch.ones(len(mine), 3)


def dispatch(verbs, routes: Routes, held: Held, *, width: int = 4, hidden=hidden_of, **options):
    mine = routes[verbs.rank]
    return dispatcher(verbs, held, **options).dispatch(
        hidden(verbs.rank, len(mine), width),
        PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 3)),
        weights_of(mine),
    )


def sent(
    routes: Routes = ROUTES, held: Held | None = None, **options
) -> list[LowLatencyDispatchOutput]:
    held = held or new_buffers()
    return LoopbackWorld(len(routes)).run(lambda verbs: dispatch(verbs, routes, held, **options))


def places(output: LowLatencyDispatchOutput) -> dict[tuple[int, int], tuple[int, int]]:
    """(local expert, slab row) -> (source rank, row at the source), by the handle."""
    handle, found = output.handle, {}
    for expert, (begins, counts) in enumerate(
        zip(handle.begin.tolist(), handle.count.tolist(), strict=True)
    ):
        for source, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            for row in range(begin, begin + count):
                found[expert, row] = (source, int(handle.source_row[expert, row]))
    return found


def due(routes: Routes, rank: int) -> list[tuple[int, int, int]]:
    """(local expert, source rank, row) of every route to a rank, sorted."""
    return sorted(
        (expert - rank * LOCAL_EXPERTS, source, row)
        for source, tokens in enumerate(routes)
        for row, slots in enumerate(tokens)
        for expert in slots
        if expert // LOCAL_EXPERTS == rank
    )


MANY: Routes = [
    [[0, 2, 4], [0, 3, 6], [0, 1, 7], [5, 0, 1]],
    [[0, 1, 2]] * 4,
    [],
    [[6, 0, 4], [7, 0, 3], [0, 4, -1]],
]
ALL_TO_ONE: Routes = [[[3, -1, -1]] * 4] * 4
WORLDS = {"few": ROUTES, "many": MANY, "one expert": ALL_TO_ONE, "nobody": NOBODY}


def combined(
    routes: Routes, output_of, *, weights=None, held: Held | None = None, seed: int = 5
) -> list[CombineOutput]:
    """Dispatch, then send back ``output_of(expert, source rank, row)`` in each column."""
    held = held or new_buffers()

    def program(verbs):
        here = dispatcher(verbs, held, seed=seed)
        output = dispatch(verbs, routes, held, seed=seed)
        slabs = torch.full_like(output.hidden_states, torch.nan)
        for (expert, row), source in places(output).items():
            slabs[expert, row] = output_of(verbs.rank * LOCAL_EXPERTS + expert, *source)
        mine = weights_of(routes[verbs.rank]) if weights is None else weights[verbs.rank]
        return here.combine(CombineInput(partial=slabs, pending_weights=mine), output.handle)

    return LoopbackWorld(len(routes)).run(program)
