"""flashinfer to either grouped layout and back: as ``standard``, once ids are local."""

from typing import Final

from moe.dispatched import FlashInferDispatchOutput, FlashInferGatheredOutput
from moe.indices import local_ids
from moe.permute import standard
from moe.permute.context import PermuteContext
from moe.stages import PrePermuteOutput


def pre_permute(
    sent: FlashInferDispatchOutput | FlashInferGatheredOutput, context: PermuteContext
) -> PrePermuteOutput:
    """Quantise every received row once, then copy it to each of its local experts.

    A one-sided dispatch leaves ids as all ranks count them; a gather has made them local. Rows
    past a count have no id, and so no copy.

    Source: SGLang 0.5.21, pre_permute_flashinfer_to_deep_gemm.
    """
    topk_ids = sent.topk_ids
    if isinstance(sent, FlashInferDispatchOutput):
        topk_ids = local_ids(topk_ids, context.expert_start, context.num_local_experts)
    return standard.group_tokens(sent.hidden_states, topk_ids, sent.topk_weights, context)


post_permute: Final = standard.post_permute
"""The same weighted sum with the scaling factor in it.

Source: SGLang 0.5.21, post_permute_deep_gemm_to_flashinfer.
"""
