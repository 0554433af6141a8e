"""All that is wrong with a trace of an engine that nobody here made: names, dtypes, shapes, maps.

``readable`` asks less of the layer's own traces, where another dtype is a finding.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe.formats import GemmLayout, Stage
from moe.trace import RankTrace
from reports.verdict.format_views import view_of
from reports.verdict.layer import JudgedLayer
from reports.verdict.readable import fits, sizes_on
from reports.verdict.trace_forms import TensorForm, forms_of
from topology.sync import PADDING

Key = tuple[Stage, str]


def trace_problems(layer: JudgedLayer, traces: Sequence[RankTrace]) -> list[str]:
    """Every problem of a trace, a sentence each: where, what was read, what is due.

    A tensor is there for all ranks that owe it, or for none: then it was not captured.
    """
    by_rank = {trace.rank: trace for trace in traces}
    ranks = range(layer.world_size)
    problems = [f"rank {rank} has no tensor" for rank in ranks if rank not in by_rank]
    problems += [
        f"rank {rank} does not exist: there are {layer.world_size}"
        for rank in sorted(by_rank.keys() - set(ranks))
    ]
    has_bias, view = layer.weights.common().correction_bias is not None, view_of(layer)
    forms = {
        rank: forms_of(layer, view, rank, has_bias=has_bias) for rank in ranks if rank in by_rank
    }
    for rank, due in forms.items():
        problems += _of_names(by_rank[rank], due)
        problems += _of_tensors(layer, by_rank[rank], due)
    return [*problems, *_of_gaps(by_rank, forms)]


def _tensors(trace: RankTrace) -> dict[Key, Tensor]:
    return {
        (stage, name): tensor
        for stage, named in trace.stages.items()
        for name, tensor in named.items()
    }


def _of_names(trace: RankTrace, due: Mapping[Key, TensorForm]) -> Iterator[str]:
    """Tensors that no such layer leaves, with the nearest that it does."""
    known = [f"{stage}/{trace.rank}/{name}" for stage, name in due]
    for stage, name in _tensors(trace).keys() - due.keys():
        key = f"{stage}/{trace.rank}/{name}"
        near = difflib.get_close_matches(key, known, n=1)
        yield f"{key}: this layer has no such tensor" + "".join(
            f"; did you mean {n}?" for n in near
        )


def _of_tensors(
    layer: JudgedLayer, trace: RankTrace, due: Mapping[Key, TensorForm]
) -> Iterator[str]:
    """dtype, shape and integers of every known tensor; a letter's size is that of its first."""
    sizes: dict[str, int] = dict(sizes_on(layer, trace.rank))
    read = {place: tensor for place, tensor in _tensors(trace).items() if place in due}
    fitting = {}
    for (stage, name), form in due.items():
        tensor = read.get((stage, name))
        if tensor is None:
            continue
        key = f"{stage}/{trace.rank}/{name}"
        is_shaped = fits(tensor.shape, form.axes, sizes)
        if tensor.dtype not in form.dtypes or not is_shaped:
            found = f"{_dtype(tensor.dtype)} {list(tensor.shape)}"
            yield f"{key}: read {found}, due {_due(form, sizes)}"
        else:
            fitting[key] = tensor
    limits = _limits(layer, sizes)
    for key, tensor in fitting.items():
        yield from _of_values(layer, trace, key, tensor, limits)


def _due(form: TensorForm, sizes: Mapping[str, int]) -> str:
    dtypes = " or ".join(map(_dtype, form.dtypes))
    axes = [
        a if isinstance(a, int) else f"{a} = {sizes[a]}" if a in sizes else a for a in form.axes
    ]
    return f"{dtypes} [{', '.join(map(str, axes))}]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_values(
    layer: JudgedLayer,
    trace: RankTrace,
    key: str,
    tensor: Tensor,
    limits: Mapping[str, tuple[int, int]],
) -> Iterator[str]:
    """Integers that map rows are in range, and tokens are numbers."""
    name = key.split("/", 2)[2]
    if name in limits:
        low, high = limits[name]
        wrong = ((tensor < low) | (tensor > high)).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            yield f"{key}: {int(tensor[tuple(at)])} at {at} is outside {low}..{high}"
    if name == "own":
        is_token = torch.tensor(layer.sync.entry[trace.rank], dtype=torch.int64) != PADDING
        odd = (is_token & ~tensor.isfinite().all(1)).nonzero()[:, 0]
        if len(odd):
            yield f"{key}: row {int(odd[0])}, a token, holds NaN or infinity; {len(odd)} such rows"
    if name == "input_ids":
        table = layer.weights.common().tid2eid
        odd = ((tensor < 0) | (tensor >= (0 if table is None else len(table)))).nonzero()
        if len(odd):
            yield f"{key}: {int(tensor[odd[0, 0]])} is no vocabulary id; {len(odd)} such rows"


def _limits(layer: JudgedLayer, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(least, largest) value of the integers that say where a row comes from and where it lies."""
    most = max(map(len, layer.sync.layer), default=0)
    limits = {
        "expert_ids": (0, layer.num_experts - 1),
        "handle.source_rank": (-1, layer.world_size - 1),
        "handle.source_slot": (-1, layer.top_k - 1),
        "handle.target_rank": (-1, layer.layout.ep - 1),
        "handle.send_index": (-1, most - 1),
        "rows.m_indices": (-1, layer.slots_per_rank - 1),
    }
    if "S" in sizes:
        counts = ("handle.begin", "handle.count", "masked_m", "rows.masked_m")
        limits |= dict.fromkeys(counts, (0, sizes["S"]))
    lengths = ("num_recv_tokens_per_expert", "psum", "restore.psum")
    limits |= dict.fromkeys(lengths, (0, max(sizes.get(rows, 0) for rows in ("M", "R", "any"))))
    letter = "M" if layer.gemm_layout is GemmLayout.CONTIG else "S"
    if letter in sizes:
        rows = sizes[letter] * (1 if letter == "M" else layer.slots_per_rank)
        limits |= {"rows.live_rows": (0, rows - 1), "restore.output_index": (-1, rows - 1)}
    return limits


def _of_gaps(
    by_rank: Mapping[int, RankTrace], forms: Mapping[int, Mapping[Key, TensorForm]]
) -> Iterator[str]:
    """Tensors that some ranks have and others lack; codes without scales; weights in part."""
    held = {rank: _tensors(by_rank[rank]).keys() for rank in forms}
    for rank, due in forms.items():
        for (stage, name), form in due.items():
            if (stage, name) in held[rank] or form.optional:
                continue
            others = [r for r in forms if (stage, name) in held[r]]
            key = f"{stage}/{rank}/{name}"
            partner = (stage, name.removesuffix("_scale"))
            if others:
                yield f"{key}: missing, but rank {others[0]} has one"
            elif partner != (stage, name) and partner in held[rank]:
                yield f"{key}: missing, but {partner[1]} cannot be read without its scales"
            elif stage is Stage.WEIGHTS and by_rank[rank].stages.get(stage):
                yield f"{key}: missing, but weights are captured as a whole or not at all"
