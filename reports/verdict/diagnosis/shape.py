"""The shape of an error that nothing explains: rows, columns, experts, ratios."""

import torch
from torch import Tensor

from reports.verdict.deviation import Deviation
from reports.verdict.diagnosis.case import Case

QUANTILES = (0.1, 0.5, 0.9)


def unexplained(deviation: Deviation, case: Case | None) -> str:
    """What is known of an error whose cause is not."""
    said = [deviation.detail]
    if case is not None and len(case.here):
        said += [_columns(case), *_experts(case), *_ratios(case)]
    return f"unexplained: {'; '.join(said)}"


def _columns(case: Case) -> str:
    columns = case.wrong.any(0).nonzero()[:, 0]
    first, last = int(columns[0]), int(columns[-1])
    return f"wrong columns {first}..{last}, {len(columns)} of {case.wrong.shape[1]}"


def _experts(case: Case) -> list[str]:
    experts = torch.unique(case.rows.expert[case.rows.expert >= 0]).tolist()
    return [f"experts {experts[:8]}"] if experts else []


def _ratios(case: Case) -> list[str]:
    """Ratios of got and due over the wrong cells: where most of it lies."""
    ratio: Tensor = (case.got / case.want)[case.wrong]
    ratio = ratio[ratio.isfinite()]
    if not len(ratio):
        return []
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    low, middle, high = torch.quantile(ratio[: 1 << 20], at).tolist()
    return [f"got / due is {middle:.4g} in the middle, {low:.4g} to {high:.4g} for most"]
