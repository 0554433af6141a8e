"""Own error of load-time weight preparation, and the weights every later stage is judged with."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from moe.trace import RankTrace
from reports.verdict import weights
from reports.verdict.captured import where_captured
from reports.verdict.decode import decode_matrix
from reports.verdict.deviation import Deviation
from reports.verdict.layer import JudgedLayer, Shard
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import Rows
from reports.verdict.weights import GoldenPreparation, Pair, StreamedWeights, expert_sizes

PREPARATION = "contract: prepared weights"


class JudgedWeights:
    """Compares prepared weights once, then hands out what each rank's GEMMs really read.

    Args:
        layer: facts of the layer.
        traces: one a rank; only stage ``weights`` is read. Where it was not captured, ranks hold
            what the golden prepares.
        ledger: takes the findings.
    """

    def __init__(self, layer: JudgedLayer, traces: Sequence[RankTrace], ledger: Ledger) -> None:
        self._layer = layer
        self._traces = [
            RankTrace(rank=trace.rank, stages={Stage.WEIGHTS: trace[Stage.WEIGHTS]})
            for trace in traces
        ]  # the judge that has these weights outlives a forward
        self._ledger = ledger
        self.preparation = GoldenPreparation(
            layer.weights, layer.recipe, layer.scale_format, expert_sizes(layer)
        )
        self.golden: StreamedWeights = self.preparation.weights()
        self._own: dict[tuple[int, int], Pair | None] = {}
        self._room = weights.CACHED_BYTES
        self._own_shared: dict[int, Pair] = {}
        self._own_router: set[int] = set()
        self._first_rows: dict[tuple[int, int], Pair] = {}
        for rank in range(layer.world_size):
            with where_captured(ledger, Stage.WEIGHTS, PREPARATION):
                self._check_rank(rank)
                ledger.ask(PREPARATION)
                ledger.passed(Stage.WEIGHTS, rank)

    def expert(self, rank: int, local: int) -> Pair:
        """(w13, w2) float64 in one slot of a rank: the golden's where they are equal."""
        if (rank, local) not in self._own:
            return self.golden_expert(rank, self._layer.local_experts(rank)[local])
        return self._own[rank, local] or self._decoded(rank, "experts", local)

    def first_row(self, rank: int, expert: int, matrix: int) -> Tensor:
        """[K] float64, the first row of the w13 (0) or w2 (1) of an expert, in a rank's shard.

        Kept of every expert once weights were compared, so that nobody has to prepare all of them
        to say which one it is.
        """
        if (expert, self._layer.expert_shard(rank).index) not in self._first_rows:
            self._note_first_rows(rank, expert, self.golden_expert(rank, expert))
        return self._first_rows[expert, self._layer.expert_shard(rank).index][matrix]

    def first_row_held(self, rank: int, local: int, matrix: int) -> Tensor:
        """The same of what really lies in a slot."""
        if (rank, local) in self._own:
            return self.expert(rank, local)[matrix][0]
        return self.first_row(rank, self._layer.local_experts(rank)[local], matrix)

    def _note_first_rows(self, rank: int, expert: int, golden: Pair) -> None:
        w13, w2 = golden
        shard = self._layer.expert_shard(rank).index
        self._first_rows[expert, shard] = (w13[0].clone(), w2[0].clone())

    def shared(self, rank: int) -> Pair | None:
        """(w13, w2) float64 of the shared expert as a rank holds it."""
        return self._own_shared.get(rank) or self.golden_shared(rank)

    def golden_expert(self, rank: int, expert: int) -> Pair:
        """(w13, w2) float64 of an expert in a rank's shard, as it should be."""
        return shard_of(self.golden.expert(expert), self._layer.expert_shard(rank))

    def golden_shared(self, rank: int) -> Pair | None:
        """The same of the shared expert, or None."""
        shared = self.golden.shared()
        return None if shared is None else shard_of(shared, self._layer.shared_shard(rank))

    def ranks_with_equal_shared(self) -> list[list[int]]:
        """Ranks grouped by the shared expert's weights they hold: the golden's, or their own."""
        if self._layer.shared_shard(0).count > 1:
            return [[rank] for rank in range(self._layer.world_size)]
        return self._faithful_together(self._own_shared)

    def ranks_with_equal_router(self) -> list[list[int]]:
        """Ranks grouped by the gate and bias they hold: the golden's, or their own."""
        return self._faithful_together(self._own_router)

    def _faithful_together(self, exceptions: Collection[int]) -> list[list[int]]:
        ranks = range(self._layer.world_size)
        faithful = [rank for rank in ranks if rank not in exceptions]
        groups = [faithful, *([rank] for rank in sorted(exceptions))]
        return [group for group in groups if group]

    def router(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """(gate weight [E, H], correction bias [E] or None) float64 as a rank holds them."""
        tensors = self._traces[rank][Stage.WEIGHTS]
        if not tensors:
            return self.golden.gate_weight, self.golden.correction_bias
        bias = tensors.get("correction_bias")
        gate = tensors["gate_weight"].to(torch.float64)
        return gate, None if bias is None else bias.to(torch.float64)

    def hash_table(self, rank: int) -> Tensor:
        """[V, K] experts of each vocabulary id as a rank holds them."""
        tensors = self._traces[rank][Stage.WEIGHTS]
        golden = self.golden.tid2eid
        return golden if golden is not None and not tensors else tensors["tid2eid"]

    def _report(self, rank: int, tensor: str, detail: str) -> None:
        self._ledger.report(
            Deviation(
                check=PREPARATION, stage=Stage.WEIGHTS, rank=rank, tensor=tensor, detail=detail
            )
        )

    def _check_rank(self, rank: int) -> None:
        tensors = self._traces[rank][Stage.WEIGHTS]
        held = tuple(tensors["expert_ids"].tolist())
        due = self._layer.local_experts(rank)
        if held != due:
            self._report(rank, "expert_ids", f"holds experts {held}, the placement says {due}")
        self._check_router(rank)
        for local, expert in enumerate(due):
            self._check_expert(rank, expert, local)
        shared = self.golden_shared(rank)
        if shared is not None:
            pair = self._decoded(rank, "shared", 0)
            if not self._compare(rank, "shared", -1, 0, pair, shared):
                self._own_shared[rank] = pair

    def _check_expert(self, rank: int, expert: int, local: int) -> None:
        pair = self._decoded(rank, "experts", local)
        golden = self.golden_expert(rank, expert)
        self._note_first_rows(rank, expert, golden)
        if not self._compare(rank, "experts", expert, local, pair, golden):
            self._own[rank, local] = self._kept(pair)

    def _kept(self, pair: Pair) -> Pair | None:
        """Matrices that are wrong, while there is room for them; None: decoded again each time."""
        size = sum(matrix.nbytes for matrix in pair)
        if size > self._room:
            return None
        self._room -= size
        return pair

    def _decoded(self, rank: int, group: str, local: int) -> Pair:
        tensors = self._traces[rank][Stage.WEIGHTS]

        group_size = self._layer.weight_group(shared=group == "shared")

        def decode(name: str) -> Tensor:
            scale = tensors.get(f"{group}.{name}.scale")
            values = tensors[f"{group}.{name}.values"][local]
            return decode_matrix(values, None if scale is None else scale[local], group_size)

        return decode("w13"), decode("w2")

    def _compare(
        self, rank: int, group: str, expert: int, local: int, got: Pair, want: Pair
    ) -> bool:
        """Enter the first unequal matrix row; True when everything is equal."""
        equal = True
        for name, ours, golden in zip(("w13", "w2"), got, want, strict=True):
            legal = same_values(ours, golden)
            if not bool(legal.all()):
                equal = False
                self._ledger.matrix(
                    PREPARATION,
                    f"{group}.{name}",
                    _matrix_rows(rank, expert, ours.shape[0]),
                    got=ours,
                    want=golden,
                    legal=legal,
                    local=local,
                )
        return equal

    def _check_router(self, rank: int) -> None:
        gate, bias = self.router(rank)
        pairs = [("gate_weight", gate, self.golden.gate_weight)]
        due = self.golden.correction_bias
        if (bias is None) != (due is None):
            self._own_router.add(rank)
            held = "holds no" if bias is None else "holds a"
            self._report(rank, "correction_bias", f"{held} correction bias, the checkpoint differs")
        elif bias is not None and due is not None:
            pairs.append(("correction_bias", bias[None], due[None]))
        table = self._traces[rank][Stage.WEIGHTS].get("tid2eid")
        if table is not None:
            assert self.golden.tid2eid is not None
            pairs.append(("tid2eid", table.double(), self.golden.tid2eid.double()))
        for name, got, want in pairs:
            legal = same_values(got, want)
            if not bool(legal.all()):
                self._own_router.add(rank)
                rows = _matrix_rows(rank, -1, got.shape[0])
                self._ledger.steps(
                    MOVES, Stage.WEIGHTS, name, rows, got=got, want=want, legal=legal
                )


def shard_of(pair: Pair, shard: Shard) -> Pair:
    """A rank's part of (w13 [2I, H], w2 [H, I]): rows of gate and of up, columns of w2."""
    if shard.count == 1:
        return pair
    w13, w2 = pair
    width = w2.shape[1] // shard.count
    part = slice(shard.index * width, (shard.index + 1) * width)
    gate, up = w13.chunk(2)
    return torch.cat([gate[part], up[part]]), w2[:, part]


def same_values(got: Tensor, want: Tensor) -> Tensor:
    """Cells that are equal, or both no number."""
    return (got == want) | (got.isnan() & want.isnan())


def _matrix_rows(rank: int, expert: int, num_rows: int) -> Rows:
    rows = Rows.of_rank(rank, num_rows)
    return Rows(
        rank=rows.rank, token=rows.token, slot=rows.slot, expert=torch.full((num_rows,), expert)
    )
