"""Kernels run on a GPU where there is one, in Triton's interpreter elsewhere."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
