"""What DeepGEMM's kernels on this GPU keep, repeat and depend on; asked of bits, not of bands.

    python -m benchmarks.gpu_kernels [--out FILE]

For bf16 and e4m3, through segments, slabs and the dense form:

bits      of sums that survive inside a block of 128 columns and across blocks (width ladder)
repeats   the same call 200 times over poisoned results
hints     slabs with other hints of how many rows are real
sms       with fewer multiprocessors
graph     a CUDA graph of the call, replayed on other rows, against the call itself
heights   slabs of other heights: how many real rows are not those of the reference GEMM

Prints it; FILE gets it as JSON, with versions and date.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from actors.machine import computing_on, gpus
from actors.results import environment
from moe.deep_gemm import DeepGemm, library
from moe.formats import ScaleFormat
from moe.gemm_backend import GemmBackend
from moe.grouped_gemm import TorchGemm
from moe.quant.fp8 import quantize_blocks, quantize_groups
from moe.random_tensors import hashed_normal
from moe.weights import ExpertMatrix
from moe.width_ladder import measured_widths

EXPERTS, IN, OUT, HEIGHT = 8, 2048, 1024, 256
REPEATS: Final = 200
HEIGHTS: Final = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384)
FORMATS: Final = (ScaleFormat.NONE, ScaleFormat.FP32)
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Rows of slabs and the experts that they meet, in one format.

    rows   [L, S, K] bf16 or e4m3
    scale  [L, S, K/128] fp32, or None
    experts  the matrices
    """

    rows: Tensor
    scale: Tensor | None
    experts: ExpertMatrix

    @property
    def flat_scale(self) -> Tensor | None:
        """[L * S, K/128]."""
        return None if self.scale is None else self.scale.flatten(0, 1)


def operands(kind: ScaleFormat, height: int, seed: int = 7) -> Operands:
    """Normal rows and weights."""
    rows = hashed_normal(seed, "rows", shape=(EXPERTS * height, IN))
    weights = hashed_normal(seed, "weights", shape=(EXPERTS, OUT, IN), std=IN**-0.5)
    if kind is ScaleFormat.NONE:
        matrix = ExpertMatrix(values=weights, scale=None)
        return Operands(rows.view(EXPERTS, height, IN), None, matrix)
    blocks, groups = quantize_blocks(weights, kind), quantize_groups(rows, kind)
    matrix = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    shape = (EXPERTS, height, -1)
    return Operands(groups.values.view(shape), groups.scale.reshape(shape), matrix)


def forms(gemm: GemmBackend, given: Operands) -> Iterator[tuple[str, Call]]:
    """Every form of the product of all rows, none of them padding."""
    loaded, height = gemm.load(given.experts), given.rows.shape[1]
    flat, scale = given.rows.flatten(0, 1), given.flat_scale
    segments = torch.arange(EXPERTS, dtype=torch.int32).repeat_interleave(height)
    full = torch.full((EXPERTS,), height, dtype=torch.int32)
    yield "segments", lambda: gemm.grouped_gemm_nt_contig(flat, scale, loaded, segments)
    yield "slabs", lambda: gemm.grouped_gemm_nt_masked(given.rows, given.scale, loaded, full)
    yield "dense", lambda: gemm.gemm_nt(flat, scale, loaded)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of bf16."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def repeats(call: Call) -> bool:
    """Whether a call has the same bits every time."""
    first = call()
    return all(same_bits(first, call()) for _ in range(REPEATS))


def hints(given: Operands, full: Tensor) -> bool:
    """Whether slabs have the same bits with every hint."""
    due = DeepGemm().grouped_gemm_nt_masked(
        given.rows, given.scale, DeepGemm().load(given.experts), full
    )
    for expected in (1, 16, 64, HEIGHT // 2):
        gemm = DeepGemm(expected_m=expected)
        got = gemm.grouped_gemm_nt_masked(given.rows, given.scale, gemm.load(given.experts), full)
        if not same_bits(due, got):
            return False
    return True


def fewer_sms(call: Call) -> bool:
    """Whether a call has the same bits on half and on a quarter of the multiprocessors."""
    due, most = call(), library().get_num_sms()
    try:
        for share in (2, 4):
            library().set_num_sms(most // share // 2 * 2)
            if not same_bits(due, call()):
                return False
    finally:
        library().set_num_sms(most)
    return True


def replays(given: Operands, call: Call, others: Operands) -> bool:
    """Whether a graph of a call, replayed on other rows in the same place, has the call's bits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    given.rows.copy_(others.rows)
    if given.scale is not None and others.scale is not None:
        given.scale.copy_(others.scale)
    graph.replay()
    return same_bits(captured, call())


def wrong_rows(kind: ScaleFormat, height: int) -> int:
    """Real rows of slabs that are not the reference GEMM's; every second slab has half of them."""
    given = operands(kind, height)
    counts = torch.full((EXPERTS,), height, dtype=torch.int32)
    counts[1::2] //= 2
    got, due = (
        gemm.grouped_gemm_nt_masked(given.rows, given.scale, gemm.load(given.experts), counts)
        for gemm in (DeepGemm(), TorchGemm("cuda"))
    )
    is_real = torch.arange(height) < counts[:, None]
    off = (got.to(torch.float32) - due.to(torch.float32)).abs().amax(2)
    return int(((off > due.abs().amax() / 64) | off.isnan())[is_real].sum())


def asked(kind: ScaleFormat) -> dict[str, Any]:
    """All questions of one format."""
    widths = measured_widths(DeepGemm(), kind)
    given = operands(kind, HEIGHT)
    full = torch.full((EXPERTS,), HEIGHT, dtype=torch.int32)
    calls = dict(forms(DeepGemm(), given))
    return {
        "bits": asdict(widths),
        "repeats": {name: repeats(call) for name, call in calls.items()},
        "hints": hints(given, full),
        "sms": {name: fewer_sms(call) for name, call in calls.items()},
        "graph": {
            name: replays(given, call, operands(kind, HEIGHT, 8)) for name, call in calls.items()
        },
        "heights": {height: wrong_rows(kind, height) for height in HEIGHTS},
    }


def main() -> None:
    """Ask, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not gpus().count:
        sys.exit("no GPU here")
    facts: dict[str, Any] = {"environment": environment(), "date": time.strftime("%F")}
    with computing_on("cuda"):
        for kind in FORMATS:
            facts[kind] = asked(kind)
            print(kind, json.dumps(facts[kind]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
