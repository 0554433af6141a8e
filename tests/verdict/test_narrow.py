"""Values in fewer bytes: only where every one of them is there."""

import math

import pytest
import torch

from reports.verdict.narrow import narrowest

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.0, -0.5, 448.0 * 2.0**-40], torch.bfloat16),
        ([NAN, INF, -INF, 0.0], torch.bfloat16),
        ([1.0, 1.0 + 2.0**-8], torch.float32),
        ([1.0, 1.0 + 2.0**-24], torch.float64),
        ([1.0, 2.0**-150], torch.float64),
        ([2.0**128], torch.float64),
        ([], torch.bfloat16),
    ],
    ids=["bf16", "no numbers", "one bit more", "too fine", "too small", "too large", "nothing"],
)
def test_values_are_kept_in_the_narrowest_dtype_that_has_them(values, dtype):
    given = torch.tensor(values, dtype=torch.float64)
    kept = narrowest(given)
    assert kept.dtype == dtype
    assert torch.equal(kept.double().nan_to_num(nan=7.0), given.nan_to_num(nan=7.0))
