"""The golden's model of a judged layer: what it computes, and where its ranks store."""

from moe.formats import SharedExpertMode, Stage
from moe.golden import GoldenModel, RoundingPath, SharedInSum
from reports.verdict.format_views import view_of
from reports.verdict.layer import JudgedLayer
from topology.sync import Gather, Reducer


def golden_model(layer: JudgedLayer) -> GoldenModel:
    """What the golden computes for this layer."""
    view = view_of(layer)
    return GoldenModel(
        routing=layer.routing,
        routed_scaling_factor=layer.factor,
        activation=layer.activation,
        recipe=layer.recipe,
        scale_format=layer.scale_format,
        wire_format=layer.wire_format if layer.requantises else None,
        input_group=layer.scales_of(Stage.PRE_PERMUTE, "rows.hidden_states").group_size or None,
        expert_hidden_size=layer.expert_hidden_size,
        path=RoundingPath(
            ep_size=layer.layout.ep,
            moe_tp=layer.layout.moe_tp,
            folds_factor=view.folds_factor,
            scales_stored_sum=layer.wide_segments,
            partials=view.partials,
            stores_weights=view.stores_weights,
            low_latency_wire=view.low_latency_wire,
            shared=_shared_in_sum(layer),
            layout=layer.gemm_layout,
            gathers_fp8=layer.gathers_fp8 and layer.sync.gather is Gather.ALL_GATHER_V,
            shared_before_gather=layer.shared is SharedExpertMode.LOCAL,
        ),
    )


def _shared_in_sum(layer: JudgedLayer) -> SharedInSum:
    """What of the shared expert enters the sum over the ranks."""
    if layer.shared is SharedExpertMode.TP_SHARDED:
        return SharedInSum.SHARDED
    deferred = layer.sync.reducer is Reducer.GLUE_OUT
    if layer.shared is SharedExpertMode.REPLICATED and deferred:
        return SharedInSum.FIRST_RANK
    return SharedInSum.ABSENT
