"""What goes into a forward: the global token list, and what one rank is handed of it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """The tokens of one forward as one global list, whatever the topology.

    hidden_states  [T, H]  bf16
    input_ids      [T]     int64  vocabulary ids, for hash layers; or None
    topk_ids       [T, K]  int32  routes pinned from outside; or None
    topk_weights   [T, K]  fp32   pinned weights; or None
    """

    hidden_states: Tensor
    input_ids: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerInput:
    """What one rank is handed for a forward.

    hidden_states  [O, H]  bf16   rows the rank holds after attention, padding included
    input_ids      [O]     int64  their vocabulary ids, for hash layers; 0 on padding rows
    topk_ids       [T, K]  int32  routes pinned from outside, for the layer's rows; or None
    topk_weights   [T, K]  fp32   their weights, or None: the router's at the ids in use
    """

    hidden_states: Tensor
    input_ids: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
