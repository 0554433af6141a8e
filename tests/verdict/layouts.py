"""Small scenarios, one a layout of the standard format or of the glue, and what each leaves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe.formats import Stage

STANDARD = "moe.dispatcher=standard"
FOUR = "parallel.world_size=4"
BF16 = "moe.recipe=bf16"
WHOLE_SHARED = "moe.shared_experts=replicated"
EP4 = "parallel.moe.ep=4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Changes to the smallest scenario, and the tensors it leaves beside those of every layer.

    shared  where the shared expert's steps are traced
    more    (stage, name) of further tensors
    """

    settings: tuple[str, ...]
    has_scales: bool
    is_masked: bool = False
    is_hashed: bool = False
    shared: Stage = Stage.TAIL
    more: tuple[tuple[Stage, str], ...] = ()

    def traced(self) -> Iterator[tuple[Stage, str]]:
        """Every tensor that is judged."""
        rows = "rows.masked_m" if self.is_masked else "rows.m_indices"
        yield from _ALWAYS
        yield from ((Stage.PRE_PERMUTE, rows), *self.more)
        yield from _HASHED if self.is_hashed else _ROUTED
        yield from ((self.shared, name) for name in _SHARED)
        if self.has_scales:
            yield from _SCALES
            yield from ((self.shared, name) for name in _SHARED_SCALES)


_ALWAYS = (
    (Stage.WEIGHTS, "expert_ids"),
    (Stage.WEIGHTS, "experts.w13.values"),
    (Stage.WEIGHTS, "experts.w2.values"),
    (Stage.WEIGHTS, "shared.w13.values"),
    (Stage.WEIGHTS, "shared.w2.values"),
    (Stage.WEIGHTS, "gate_weight"),
    (Stage.GLUE_IN, "own"),
    (Stage.GLUE_IN, "hidden_states"),
    (Stage.ROUTE, "logits"),
    (Stage.ROUTE, "topk_ids"),
    (Stage.ROUTE, "topk_weights"),
    (Stage.DISPATCH, "physical_ids"),
    (Stage.DISPATCH, "hidden_states"),
    (Stage.DISPATCH, "topk_ids"),
    (Stage.DISPATCH, "topk_weights"),
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.PRE_PERMUTE, "restore.topk_ids"),
    (Stage.PRE_PERMUTE, "restore.topk_weights"),
    (Stage.PRE_PERMUTE, "restore.output_index"),
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "activation"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.GEMM2, "output"),
    (Stage.POST_PERMUTE, "partial"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
    (Stage.GLUE_OUT, "hidden_states"),
)
_ROUTED = ((Stage.WEIGHTS, "correction_bias"),)
_HASHED = ((Stage.WEIGHTS, "tid2eid"), (Stage.GLUE_IN, "input_ids"))
_SCALES = (
    (Stage.WEIGHTS, "experts.w13.scale"),
    (Stage.WEIGHTS, "experts.w2.scale"),
    (Stage.WEIGHTS, "shared.w13.scale"),
    (Stage.WEIGHTS, "shared.w2.scale"),
    (Stage.PRE_PERMUTE, "rows.hidden_states_scale"),
    (Stage.ACTIVATION, "hidden_states_scale"),
)
_SHARED = (
    "shared.input",
    "shared.gate_up",
    "shared.activation",
    "shared.hidden_states",
    "shared.output",
)
_SHARED_SCALES = ("shared.input_scale", "shared.hidden_states_scale")
_SUMMAND = (Stage.TAIL, "summand")
_REDUCED = (Stage.TAIL, "reduced")
_LIVE_ROWS = (Stage.PRE_PERMUTE, "rows.live_rows")

LAYOUTS: Mapping[str, Layout] = {
    "pure_tp": Layout(
        settings=(
            STANDARD,
            BF16,
            "parallel.attention={dp: 1, tp: 2}",
            "parallel.moe={ep: 1, tp: 2}",
            "batch.tokens=[7]",
        ),
        has_scales=False,
        more=(_SUMMAND, _REDUCED, _LIVE_ROWS),
    ),
    "dp_tp_all_reduce": Layout(
        settings=(
            STANDARD,
            FOUR,
            EP4,
            WHOLE_SHARED,
            "platform=sm90",
            "parallel.attention={dp: 2, tp: 2}",
            "batch.tokens=[5, 3]",
        ),
        has_scales=True,
        more=(_SUMMAND, _REDUCED, _LIVE_ROWS),
    ),
    "dp_ep_reduce_scatter_v": Layout(
        settings=(
            STANDARD,
            FOUR,
            EP4,
            WHOLE_SHARED,
            "parallel.attention.dp=4",
            "batch.tokens=[5, 0, 9, 3]",
        ),
        has_scales=True,
        more=(_SUMMAND, _LIVE_ROWS),
    ),
    "cp_gather": Layout(
        settings=(
            STANDARD,
            FOUR,
            EP4,
            BF16,
            "parallel.attention={dp: 1, cp: 4}",
            "batch.tokens=[13]",
        ),
        has_scales=False,
        more=(_SUMMAND, _LIVE_ROWS),
    ),
    "tp_ep_all_to_all": Layout(
        settings=(
            FOUR,
            EP4,
            "parallel.attention={dp: 1, tp: 4}",
            "batch.tokens=[6]",
        ),
        has_scales=True,
        more=(
            _LIVE_ROWS,
            (Stage.DISPATCH, "wire"),
            (Stage.DISPATCH, "wire_scale"),
            (Stage.DISPATCH, "hidden_states_scale"),
            (Stage.DISPATCH, "num_recv_tokens_per_expert"),
            (Stage.DISPATCH, "handle.source_rank"),
            (Stage.DISPATCH, "handle.source_row"),
        ),
    ),
    "masked_max_len": Layout(
        settings=(
            STANDARD,
            FOUR,
            EP4,
            WHOLE_SHARED,
            "parallel.attention={dp: 2, tp: 2}",
            "batch.tokens=[4, 3]",
            "batch.phase=decode",
            "moe.layout=masked",
        ),
        has_scales=True,
        is_masked=True,
        more=(_SUMMAND, _REDUCED),
    ),
    "hash_layer": Layout(
        settings=(
            STANDARD,
            BF16,
            "batch.phase=decode",
            "model.layer=hash_moe",
            "model.overrides.vocab_size=100",
        ),
        has_scales=False,
        is_hashed=True,
        more=(_SUMMAND, _LIVE_ROWS),
    ),
    "local_shared_expert": Layout(
        settings=(
            STANDARD,
            "moe.shared_experts=local",
            "moe.layout=masked",
            "model.overrides.swiglu_limit=null",
        ),
        has_scales=True,
        is_masked=True,
        shared=Stage.GLUE_OUT,
        more=(_SUMMAND, (Stage.GLUE_OUT, "returned")),
    ),
    "dp_gather_fp8": Layout(
        settings=(STANDARD, WHOLE_SHARED, "moe.switches.dp_gather_fp8=true"),
        has_scales=True,
        more=(
            _SUMMAND,
            _LIVE_ROWS,
            (Stage.GLUE_IN, "wire"),
            (Stage.GLUE_IN, "wire_scale"),
        ),
    ),
}

UNJUDGED = frozenset(
    {
        (Stage.DISPATCH, "handle.sent_row"),
        (Stage.DISPATCH, "handle.send_counts"),
        (Stage.DISPATCH, "handle.recv_counts"),
    }
)
"""What only the dispatcher's own way back reads; a wrong one is an error of combine."""
