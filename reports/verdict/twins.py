"""The noise floor of a scenario: what right implementations of it differ by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.golden import GoldenModel, GoldenTrace, GoldenWeights, Terms, golden_forward, tail
from reports.verdict.band import fp32_noise
from reports.verdict.cells import all_finite
from reports.verdict.compared import check_stored
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.stage_checks import StageChecks, product
from reports.verdict.weights import Pair, StreamedWeights

NUM_TWINS: Final = 3
MOST_TWINS: Final = 1 << 8

SAMPLED_TOKENS: Final = 32
"""Tokens that a twin computes, evenly spread over all."""

SAMPLED_WEIGHTS: Final = 1 << 24
"""Weights that these tokens' experts may have, beyond those of the first token."""

SAMPLED_EXPERTS: Final = 4
"""Experts of a twin, evenly spread, whose GEMMs its own errors are measured in."""

_OF_TRACE: Final = (
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "activation"),
    (Stage.GEMM2, "expert_output"),
    (Stage.COMBINE, "routed"),
    (Stage.GLUE_OUT, "output"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOfStage:
    """What the twins differ by in one stage.

    twins      how many
    tokens     how many they computed, all together
    own_worst  worst own error / band; None where the golden keeps no input of the stage's sum
    worst_row  worst relative error of a row against the golden, from the start
    spread     largest relative Frobenius distance of a twin to the golden, from the start
    """

    stage: Stage
    twins: int
    tokens: int
    own_worst: float | None
    worst_row: float
    spread: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Twins:
    """Makes twins of a golden forward and measures them.

    layer    facts of the layer
    model    what the golden computes
    weights  as the GEMMs read them
    """

    layer: JudgedLayer
    model: GoldenModel
    weights: GoldenWeights

    def noise(
        self, batch: Batch, golden: GoldenTrace, ep_ranks: Tensor, count: int
    ) -> Sequence[NoiseOfStage]:
        """Of every stage that the golden keeps, over a sample of the tokens.

        Args:
            batch: the global token list.
            golden: its forward with the recipe's rounding points.
            ep_ranks: [T, K] EP rank of each of its routes.
            count: number of twins.
        """
        if not count or not len(golden.topk_ids):
            return ()
        samples = [self._sample(golden, number) for number in range(count)]
        weights = _in_fp32(self.weights)
        twins = [
            self._twin(weights, batch, golden, ep_ranks, tokens, number)
            for number, tokens in enumerate(samples)
        ]
        own = Ledger()
        for number, twin in enumerate(twins):
            self._enter_own_errors(twin, number, own)
        tokens = len(torch.unique(torch.cat(samples)))
        rows = []
        for stage, name in _OF_TRACE:
            due = [getattr(golden, name)[tokens].to(torch.float64) for tokens in samples]
            pairs = list(zip([getattr(t, name).to(torch.float64) for t in twins], due, strict=True))
            rows.append(
                NoiseOfStage(
                    stage=stage,
                    twins=count,
                    tokens=tokens,
                    own_worst=own.worst.get((stage, 0)),
                    worst_row=max(float(_row_errors(*pair).max()) for pair in pairs),
                    spread=max(_distance(*pair) for pair in pairs),
                )
            )
        return rows

    def _seed(self, number: int) -> int:
        """Of one twin: no two of any scenario seeds have the same."""
        return self.layer.seed * MOST_TWINS + number

    def _sample(self, golden: GoldenTrace, number: int) -> Tensor:
        """[S] tokens of one twin in an order of its own, as many as fit the limits."""
        ids = golden.topk_ids
        tokens = spread(SAMPLED_TOKENS, len(ids), number)
        generator = torch.Generator().manual_seed(self._seed(number))
        order = torch.randperm(len(tokens), generator=generator, device="cpu")
        tokens = tokens[order.to(tokens.device)]
        an_expert = 3 * self.layer.intermediate_size * self.layer.expert_hidden_size
        seen: set[int] = set()
        for place, token in enumerate(tokens.tolist()):
            seen |= set(ids[token][ids[token] >= 0].tolist())
            if place and len(seen) * an_expert > SAMPLED_WEIGHTS:
                return tokens[:place]
        return tokens

    def _twin(
        self,
        weights: GoldenWeights,
        batch: Batch,
        golden: GoldenTrace,
        ep_ranks: Tensor,
        tokens: Tensor,
        number: int,
    ) -> GoldenTrace:
        """On the golden's routes and weights: the router has a rule of its own."""
        return golden_forward(
            replace(self.model, twin=self._seed(number)),
            weights,
            batch.hidden_states[tokens],
            rounding=True,
            topk_ids=golden.topk_ids[tokens],
            topk_weights=golden.topk_weights[tokens],
            ep_ranks=ep_ranks[tokens],
        )

    def _enter_own_errors(self, twin: GoldenTrace, number: int, own: Ledger) -> None:
        """A twin's GEMMs and tail, held against the golden's on the twin's own input."""
        experts = torch.unique(twin.topk_ids[twin.topk_ids >= 0])
        sums: dict[Stage, list[_Sum]] = {}
        for expert in experts[spread(SAMPLED_EXPERTS, len(experts), number)].tolist():
            for stage, one in self._sums_of(twin, expert):
                sums.setdefault(stage, []).append(one)
        for stage, of_experts in sums.items():
            self._enter_gemm(own, stage, of_experts)
        if self.layer.is_all_to_all:
            self._enter_tail(own, twin)

    def _sums_of(self, twin: GoldenTrace, expert: int) -> Iterator[tuple[Stage, "_Sum"]]:
        """Both GEMMs of one expert, the second where no rank has a part of it alone."""
        token, slot = (twin.topk_ids == expert).nonzero(as_tuple=True)
        w13, w2 = self.weights.expert(expert)
        yield Stage.GEMM1, _sum(twin.gate_up[token, slot], twin.dispatched[token], w13)
        if self.layer.layout.moe_tp == 1:
            activation = twin.activation[token, slot]
            yield Stage.GEMM2, _sum(twin.expert_output[token, slot], activation, w2)

    def _enter_gemm(self, own: Ledger, stage: Stage, sums: Sequence["_Sum"]) -> None:
        got = torch.cat([one.got for one in sums])
        want = Terms(
            value=torch.cat([one.want.value for one in sums]),
            magnitude=torch.cat([one.want.magnitude for one in sums]),
        )
        checks = StageChecks(own, stage, self.layer, Rows.of_rank(0, len(got)))
        checks.gemm("twin", got, want, sums[0].terms)

    def _enter_tail(self, own: Ledger, twin: GoldenTrace) -> None:
        factor = 1.0 if self.model.path.folds_factor else self.layer.factor
        shared = None if twin.shared is None else twin.shared.to(torch.float64)
        want = tail(twin.routed.to(torch.float64), shared, factor)
        check_stored(
            own,
            Stage.GLUE_OUT,
            "twin",
            Rows.of_rank(0, len(want.value)),
            got=twin.output.to(torch.float64),
            want=want.value,
            noise=fp32_noise(want.magnitude, 2),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """What a GEMM gave for the rows of one expert, what it should have, and of how many terms."""

    got: Tensor
    want: Terms
    terms: int


def _sum(got: Tensor, operand: Tensor, weight: Tensor) -> _Sum:
    return _Sum(got, product(operand.to(torch.float64), weight), operand.shape[1])


def spread(count: int, size: int, shift: int) -> Tensor:
    """[min(count, size)] places among ``size``, evenly spread, all moved by ``shift``."""
    count = min(count, size)
    return (torch.arange(count) * size // max(count, 1) + shift) % max(size, 1)


def _in_fp32(weights: GoldenWeights) -> GoldenWeights:
    """Experts rounded to fp32 once for all twins."""

    def rounded(pair: Pair) -> Pair:
        return pair[0].to(torch.float32), pair[1].to(torch.float32)

    def shared() -> Pair | None:
        pair = weights.shared()
        return None if pair is None else rounded(pair)

    return StreamedWeights(
        weights.gate_weight,
        weights.correction_bias,
        weights.tid2eid,
        weights.intermediate_size,
        lambda expert: rounded(weights.expert(expert)),
        shared,
    )


def _row_errors(got: Tensor, want: Tensor) -> Tensor:
    """[rows] relative error; 0 of an absent one."""
    error, size = (got - want).flatten(0, -2).norm(dim=1), want.flatten(0, -2).norm(dim=1)
    return torch.where(error == 0, 0.0, error / size).nan_to_num(nan=0.0)


def _distance(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius distance of finite cells."""
    error, size = got - want, want
    if not (all_finite(got) and all_finite(want)):
        finite = got.isfinite() & want.isfinite()
        error, size = error[finite], want[finite]
    error, size = error.norm(), size.norm()
    return float(torch.where(error == 0, 0.0, error / size))
