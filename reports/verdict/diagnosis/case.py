"""One deviation with everything that a hypothesis may look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.decode import codes_f64
from reports.verdict.deviation import Deviation
from reports.verdict.diagnosis.luck import bits_of_cells
from reports.verdict.evidence import Evidence
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import Rows, take_rows
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject
from topology.sync import PADDING, Reducer

GROUPED_STAGES = (Stage.PRE_PERMUTE, Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2)
"""Where routes lie in grouped rows."""

ROW_TENSORS = (
    "own",
    "wire",
    "hidden_states",
    "gate_up",
    "activation",
    "output",
    "partial",
    "routed",
    "reduced",
    "summand",
    "returned",
    "shared.input",
    "shared.gate_up",
    "shared.activation",
    "shared.hidden_states",
    "shared.output",
)

LAYER_ROWS_OF_DISPATCH = ("physical_ids", "wire", "wire_scale", "handle.topk_ids")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scene:
    """What all deviations of a forward have around them.

    subject  the forward
    weights  what each rank's GEMMs read
    ledger   what its checks entered
    earlier  the forward before on the same buffers, or None
    """

    subject: Subject
    weights: JudgedWeights
    ledger: Ledger
    earlier: Subject | None = None


class Case:
    """A deviation and both sides of the comparison behind it, cut down to its rank.

    Args:
        scene: the forward.
        deviation: of one of its comparisons.
        evidence: both sides, of all ranks that were compared at once.
        subject: another forward to look at; None: the scene's own.
        is_whole: its rows are all compared rows of the rank, the wrong ones in front.
    """

    def __init__(
        self,
        scene: Scene,
        deviation: Deviation,
        evidence: Evidence,
        *,
        subject: Subject | None = None,
        is_whole: bool = False,
    ) -> None:
        self.scene = scene
        self.subject = subject or scene.subject
        self.is_whole = is_whole
        self.layer = scene.subject.layer
        self.deviation = deviation
        self.evidence = evidence
        self.stage, self.rank, self.tensor = deviation.stage, deviation.rank, deviation.tensor

    @cached_property
    def _of_rank(self) -> Tensor:
        """[n] places among the evidence's rows that are of this rank."""
        return (self.evidence.rows.rank == self.rank).nonzero()[:, 0]

    @cached_property
    def whole(self) -> "Case":
        """The same with the rank's right rows behind the wrong ones: W + V rows, not W."""
        return Case(self.scene, self.deviation, self.evidence, is_whole=True)

    def before(self, earlier: Subject) -> "Case":
        """The same places in the forward before."""
        return Case(self.scene, self.deviation, self.evidence, subject=earlier)

    @cached_property
    def _is_wrong(self) -> Tensor:
        """[n] bool of this rank's compared rows."""
        return self.evidence.wrong[self._of_rank].any(1)

    @cached_property
    def within(self) -> Tensor:
        """[W] int64: which of this rank's compared rows are wrong."""
        return self.evidence.place[self.here]

    def lawful(self, fits: Tensor) -> Tensor:
        """[W] bool: wrong rows that a law of the whole rank gives, if no right row contradicts it.

        Args:
            fits: [W + V] bool, rows of ``whole`` that are as the law has them.
        """
        count = int(self._is_wrong.sum())
        return fits[:count] & bool(fits[count:].all())

    @cached_property
    def here(self) -> Tensor:
        """[W] int64 places of the wrong rows among the evidence's rows."""
        wrong = self._is_wrong.nonzero()[:, 0]
        chosen = torch.cat([wrong, (~self._is_wrong).nonzero()[:, 0]]) if self.is_whole else wrong
        return self._of_rank[chosen]

    @cached_property
    def right(self) -> Tensor:
        """[V] int64 places of this rank's other rows, which are as they should be."""
        return self._of_rank[~self._is_wrong]

    @cached_property
    def rows(self) -> Rows:
        """Coordinates of the wrong rows."""
        return self.evidence.rows[self.here]

    @cached_property
    def got(self) -> Tensor:
        """[W, C] float64 of the wrong rows."""
        return self.evidence.got[self.here]

    @cached_property
    def want(self) -> Tensor:
        """[W, C] float64 that is due there."""
        return self.evidence.want[self.here]

    @cached_property
    def band(self) -> Tensor:
        """[W, C] float64, largest error allowed there."""
        return self.evidence.band[self.here]

    @cached_property
    def wrong(self) -> Tensor:
        """[W, C] bool cells of the wrong rows that are wrong."""
        return self.evidence.wrong[self.here]

    @property
    def is_scale(self) -> bool:
        """Whether the tensor holds scales."""
        return self.tensor.endswith("_scale")

    @property
    def holds_rows(self) -> bool:
        """Whether a row is one of values along the hidden or the intermediate axis."""
        is_row = self.tensor.removeprefix("rows.") in ROW_TENSORS
        return is_row and self.stage is not Stage.WEIGHTS

    @property
    def check_is_move(self) -> bool:
        """Whether the values should be those of elsewhere, bit for bit."""
        return self.deviation.check == MOVES

    @property
    def sums_in_glue(self) -> bool:
        """Whether the glue behind the tail sums over the ranks."""
        return self.layer.sync.reducer is Reducer.GLUE_OUT

    def bits_of(self, explains: Tensor) -> float:
        """What hitting every wrong cell of some wrong rows [W] by luck takes."""
        evidence, hit = self.evidence, self.got[explains][self.wrong[explains]]
        return bits_of_cells(hit, evidence.want, evidence.band)

    def none(self) -> Tensor:
        """[W] bool: no wrong row."""
        return torch.zeros(len(self.here), dtype=torch.bool)

    def sibling(self, tensor: str) -> "Case | None":
        """The case of another tensor of the same stage and rank that deviates as well."""
        found = evidence_of(self.scene.ledger, self.stage, self.rank, (tensor,))
        return Case(self.scene, *found[0]) if found else None

    @cached_property
    def traced(self) -> Tensor | None:
        """[M, ...] the tensor as the rank left it, slabs laid end to end; None if it is derived."""
        names = (self.tensor, f"rows.{self.tensor}")
        held = self.subject.stage(self.stage, self.rank)
        found = [name for name in names if name in held]
        return self.subject.grouped(self.stage, self.rank, found[0]) if found else None

    @property
    def num_compared(self) -> int:
        """How many rows of this rank were compared, kept as evidence or not."""
        return self.evidence.compared[self.rank]

    @cached_property
    def _compared_rows(self) -> Tensor | None:
        """[n] int64 rows of ``traced`` that were compared; None where that is not known."""
        traced = self.traced
        if traced is None or self.stage is Stage.WEIGHTS:
            return None
        index = self._row_index(len(traced))
        if index is None or len(index) != self.num_compared:
            return None
        return index if bool((index < len(traced)).all()) else None

    @property
    def compared_places(self) -> Tensor | None:
        """Rows of ``traced`` that were compared; None unless all are known, and kept."""
        is_whole = self.num_compared == len(self._of_rank)
        return self._compared_rows if is_whole else None

    @property
    def places(self) -> Tensor | None:
        """[W] int64 rows of ``traced`` that are wrong, of those kept; None: not known."""
        return None if self._compared_rows is None else self._compared_rows[self.within]

    @property
    def num_groups(self) -> int:
        """Columns of scales of the rows that the scales belong to; 0 where there are none."""
        size = self.layer.scales_of(self.stage, self.tensor.removesuffix("_scale")).group_size
        held = self.subject.stage(self.stage, self.rank)
        names = [n for n in (self.tensor, f"rows.{self.tensor}") if n in held]
        width = held[names[0].removesuffix("_scale")].shape[-1] if names else 0
        return width // size if size else 0

    def _row_index(self, num_rows: int) -> Tensor | None:
        """Rows of ``traced`` in the order of this rank's compared rows."""
        subject, rank = self.subject, self.rank
        is_of_route = bool((self.rows.slot >= 0).all())
        if is_of_route and self.stage in GROUPED_STAGES:
            return subject.placed[rank].row
        if is_of_route and self.stage is Stage.DISPATCH:
            return subject.routes[rank].received
        if self.num_compared == num_rows:
            return torch.arange(num_rows)
        if self.stage is Stage.GLUE_IN:
            tokens = subject.own_tokens if self.tensor == "own" else subject.layer_tokens
            return (tokens[rank] != PADDING).nonzero()[:, 0]
        if self.stage is Stage.DISPATCH and self.tensor not in LAYER_ROWS_OF_DISPATCH:
            return (subject.received_from[rank] >= 0).nonzero()[:, 0]
        return None


def numbers(rows: Tensor) -> Tensor:
    """[M, C] float64 of traced rows of any dtype: codes, words and ids as they are."""
    flat = rows if rows.dim() > 1 else rows[:, None]
    return codes_f64(flat) if flat.dtype == torch.float8_e4m3fn else flat.to(torch.float64)


def traced_rows(rows: Tensor, places: Tensor) -> Tensor:
    """``numbers`` of some rows."""
    return numbers(take_rows(rows, places))


def evidence_of(
    ledger: Ledger, stage: Stage, rank: int, tensors: Sequence[str]
) -> list[tuple[Deviation, Evidence]]:
    """Deviations of these tensors on a rank that have both sides, in the order of tensors."""
    return [
        (deviation, ledger.evidence[deviation])
        for tensor in tensors
        for deviation in ledger.deviations
        if deviation in ledger.evidence
        and (deviation.stage, deviation.rank, deviation.tensor) == (stage, rank, tensor)
    ]
