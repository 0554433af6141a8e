"""Geometry of the drawing: ranks with tokens, the way to the experts and back, what broke.

``topology.svg.j2`` turns it into SVG.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

from moe.formats import Stage
from reports.html.wording import plural
from reports.html.world import Exchange, World
from reports.result import CheckVerdict, RankVerdict, Result

RANKS_DRAWN_WITH_EDGES: Final = 16
RANKS_WITH_FULL_LABELS: Final = 8
WIDTH: Final = 1040
LEFT: Final = 108
BOX_HEIGHT: Final = 46
BOX_MAX_WIDTH: Final = 200
ROW_TOPS: Final = (26, 170, 314)
GRID_COLUMNS: Final = 16
GRID_PITCH: Final = (WIDTH // GRID_COLUMNS, BOX_HEIGHT + 6)

TOKENS, EXPERTS, OUTPUT = range(3)
ROW_OF_STAGE: Final[Mapping[Stage, int]] = {
    Stage.WEIGHTS: EXPERTS,
    Stage.GLUE_IN: TOKENS,
    Stage.ROUTE: TOKENS,
    Stage.DISPATCH: EXPERTS,
    Stage.PRE_PERMUTE: EXPERTS,
    Stage.GEMM1: EXPERTS,
    Stage.ACTIVATION: EXPERTS,
    Stage.GEMM2: EXPERTS,
    Stage.POST_PERMUTE: EXPERTS,
    Stage.COMBINE: OUTPUT,
    Stage.TAIL: OUTPUT,
    Stage.GLUE_OUT: OUTPUT,
}
"""The row of boxes a stage acts in; dispatch and combine act on the edges into it."""
ROW_STYLES: Final = ("rank", "experts", "rank")
LABEL_LENGTH: Final = 16
EDGE_STAGES: Final = frozenset({Stage.DISPATCH, Stage.COMBINE})


@dataclass(frozen=True, slots=True)
class Box:
    """One rank in one row, placed by its top middle."""

    centre: float
    top: float
    width: float
    head: str
    text: str
    title: str
    style: str


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text at the left margin."""

    y: float
    text: str
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All there is to draw; edges and arrows are SVG path data, outlines (x, y, width, height)."""

    height: float
    caption: str
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...] = ()
    outlines: tuple[tuple[float, float, float, float], ...] = ()
    edges: str = ""
    edge_opacity: float = 1.0
    broken_edges: str = ""
    arrows: str = ""
    width: int = WIDTH
    box_height: int = BOX_HEIGHT


@dataclass(frozen=True, slots=True)
class Broken:
    """What the result reports as broken, as places (row, rank); edges are named by their end."""

    boxes: frozenset[tuple[int, int]]
    edges: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, result: Result) -> Self:
        """Stages that did not agree, the first divergence, and ranks that were lost."""
        bad = (CheckVerdict.DISCREPANCY, CheckVerdict.FAILED)
        lost = (RankVerdict.RAISED, RankVerdict.DIED, RankVerdict.HUNG)
        acts: set[tuple[Stage | None, int]] = {
            *((row.stage, row.rank) for row in result.stages if row.verdict in bad),
            *((rank.stage, rank.rank) for rank in result.ranks if rank.verdict in lost),
        }
        moving = {row.stage for row in result.traffic} or EDGE_STAGES
        if first := result.first_divergence:
            acts.add((first.stage, first.rank))
        placed = {(ROW_OF_STAGE[stage], rank) for stage, rank in acts if stage}
        whole = {(row, rank) for stage, rank in acts if stage is None for row in range(3)}
        moved = {(stage, rank) for stage, rank in acts if stage and stage in moving}
        edges = {(_row_an_edge_ends_in(stage), rank) for stage, rank in moved}
        return cls(frozenset(placed | whole), frozenset(edges))


def draw_topology(result: Result) -> Drawing | None:
    """The drawing, with edges for up to 16 ranks, else one box a rank.

    Returns:
        None where the scenario does not describe ranks.
    """
    world = World.of(result)
    if world is None:
        return None
    draw = _draw_rows if world.size <= RANKS_DRAWN_WITH_EDGES else _draw_grid
    return draw(world, Broken.of(result))


def _draw_rows(world: World, broken: Broken) -> Drawing:
    boxes = {
        (row, rank): _row_box(world, broken, row, rank)
        for row, rank in product((TOKENS, EXPERTS, OUTPUT), range(world.size))
    }
    ways = [way for way in _ways(world) if way[1] not in broken.edges]
    broken_ways = [way for way in _ways(world) if way[1] in broken.edges]
    return Drawing(
        height=ROW_TOPS[OUTPUT] + BOX_HEIGHT + 14,
        caption="Read downwards: tokens on their ranks, on to the experts, back to their owners. "
        "Lines join ranks that exchange rows.",
        boxes=tuple(boxes.values()),
        labels=_row_labels(world),
        outlines=_outlines(world, boxes),
        edges=_edges(boxes, ways),
        edge_opacity=round(min(0.6, 3 / world.size), 2),
        broken_edges=_edges(boxes, broken_ways),
        arrows=_arrows(boxes),
    )


def _row_box(world: World, broken: Broken, row: int, rank: int) -> Box:
    pitch = (WIDTH - LEFT) / world.size
    text = world.experts_text(rank) if row == EXPERTS else world.tokens_text(rank)
    is_broken = (row, rank) in broken.boxes
    is_idle = row != EXPERTS and world.num_tokens(rank) == 0
    name = f"rank {rank}"
    if world.size > RANKS_WITH_FULL_LABELS:
        name, text = str(rank), text.split(" ")[row == EXPERTS] if text else ""
    return Box(
        centre=round(LEFT + pitch * (rank + 0.5), 1),
        top=ROW_TOPS[row],
        width=round(min(pitch - 10, BOX_MAX_WIDTH), 1),
        head=f"✕ {name}" if is_broken else name,
        text=text,
        title=_title(world, rank),
        style="broken" if is_broken else "idle" if is_idle else ROW_STYLES[row],
    )


def _title(world: World, rank: int) -> str:
    return ", ".join(
        filter(None, (f"rank {rank}", world.tokens_text(rank), world.experts_text(rank)))
    )


def _ways(world: World) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Every (from, to) between neighbouring rows; ranks without tokens send and get none."""
    busy = [rank for rank in range(world.size) if world.num_tokens(rank) != 0]
    there = _pairs(world, world.before, busy)
    back = _pairs(world, world.after, busy)
    return [((TOKENS, a), (EXPERTS, b)) for a, b in there] + [
        ((EXPERTS, b), (OUTPUT, a)) for a, b in back
    ]


def _pairs(
    world: World, exchanges: Iterable[Exchange], busy: Iterable[int]
) -> list[tuple[int, int]]:
    """(a rank with tokens, a rank that it exchanges rows with); itself where nothing moves."""
    groups = [group for exchange in exchanges for group in exchange.groups]
    if not groups:
        return [(rank, rank) for rank in busy]
    have = set(busy)
    ranks = range(world.size)
    pairs = {pair for group in groups for pair in product(group, group)}
    return sorted((a, b) for a, b in pairs if a in have and b in ranks)


def _row_an_edge_ends_in(stage: Stage) -> int:
    return EXPERTS if stage.position <= Stage.DISPATCH.position else OUTPUT


def _edges(
    boxes: Mapping[tuple[int, int], Box],
    ways: Iterable[tuple[tuple[int, int], tuple[int, int]]],
) -> str:
    curves = []
    for start, end in ways:
        x0, x1 = boxes[start].centre, boxes[end].centre
        y0, y1 = boxes[start].top + BOX_HEIGHT, boxes[end].top - 7
        middle = (y0 + y1) / 2
        curves.append(f"M{x0} {y0}C{x0} {middle} {x1} {middle} {x1} {y1}")
    return "".join(curves)


def _arrows(boxes: Mapping[tuple[int, int], Box]) -> str:
    tips = [box for (row, _), box in boxes.items() if row != TOKENS and box.style != "idle"]
    return "".join(f"M{box.centre} {box.top}l-5 -8h10z" for box in tips)


def _outlines(
    world: World, boxes: Mapping[tuple[int, int], Box]
) -> tuple[tuple[float, float, float, float], ...]:
    """Frames round attention-DP groups of several ranks and round ranks that share experts."""
    groups = [(row, world.ranks_per_dp_group) for row in (TOKENS, OUTPUT)]
    groups.append((EXPERTS, world.size // world.ep_size))
    frames = []
    for row, ranks in groups:
        for first in range(0, world.size, ranks) if ranks > 1 else ():
            left, right = boxes[row, first], boxes[row, first + ranks - 1]
            x = left.centre - left.width / 2 - 4
            frames.append((x, left.top - 4, right.centre + right.width / 2 + 4 - x, BOX_HEIGHT + 8))
    return tuple(frames)


def _row_labels(world: World) -> tuple[Label, ...]:
    attention = f"{plural(world.attn_dp, 'DP group')} x {world.ranks_per_dp_group}"
    experts = f"EP {world.ep_size} x TP {world.size // world.ep_size}"
    return tuple(
        label
        for top, name, note in (
            (ROW_TOPS[TOKENS] + 19, "tokens", attention),
            (
                (ROW_TOPS[TOKENS] + ROW_TOPS[EXPERTS] + BOX_HEIGHT) / 2 - 4,
                *_way(world.before, "no exchange"),
            ),
            (ROW_TOPS[EXPERTS] + 19, "experts", experts),
            (
                (ROW_TOPS[EXPERTS] + ROW_TOPS[OUTPUT] + BOX_HEIGHT) / 2 - 4,
                *_way(world.after, "no exchange"),
            ),
            (ROW_TOPS[OUTPUT] + 19, "output", attention),
        )
        for label in (Label(top, name, "name"), Label(top + 16, note[:LABEL_LENGTH], "note"))
    )


def _way(exchanges: tuple[Exchange, ...], otherwise: str) -> tuple[str, str]:
    """Stages that move rows, and the verbs they do it with."""
    stages = dict.fromkeys(str(exchange.stage) for exchange in exchanges)
    verbs = list(dict.fromkeys(exchange.op.removesuffix("_v") for exchange in exchanges))
    more = f" +{len(verbs) - 1}" if len(verbs) > 1 else ""
    return f"↓ {' + '.join(stages) or 'stay'}", f"{verbs[0]}{more}" if verbs else otherwise


def _draw_grid(world: World, broken: Broken) -> Drawing:
    rows = -(-world.size // GRID_COLUMNS)
    return Drawing(
        height=rows * GRID_PITCH[1] + 4,
        caption=(
            f"{world.size} ranks are too many to draw every edge: one box a rank, with its tokens. "
            f"{plural(world.attn_dp, 'attention-DP group')} of {world.ranks_per_dp_group}; "
            f"{world.dispatcher[:LABEL_LENGTH]} moves tokens among EP {world.ep_size} "
            f"x TP {world.size // world.ep_size} and back."
        ),
        boxes=tuple(_grid_box(world, broken, rank) for rank in range(world.size)),
    )


def _grid_box(world: World, broken: Broken, rank: int) -> Box:
    row, column = divmod(rank, GRID_COLUMNS)
    is_broken = any((place, rank) in broken.boxes for place in (TOKENS, EXPERTS, OUTPUT))
    is_idle = world.num_tokens(rank) == 0
    return Box(
        centre=GRID_PITCH[0] * (column + 0.5),
        top=row * GRID_PITCH[1] + 2,
        width=GRID_PITCH[0] - 6,
        head=f"✕ {rank}" if is_broken else str(rank),
        text=world.tokens_text(rank).replace("token", "tok").replace("toks", "tok"),
        title=_title(world, rank),
        style="broken" if is_broken else "idle" if is_idle else "rank",
    )
