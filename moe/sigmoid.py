"""The logistic function, with bits that do not depend on where in a tensor a value stands."""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` in fp32.

    torch's own on a CPU gives the last few values of a tensor other bits (seen: behind the last
    whole 32), so a token's weights would depend on how many tokens stand beside it.
    """
    return torch.exp(-x).add_(1).reciprocal_()
