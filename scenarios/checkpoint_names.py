"""Which tensors of a checkpoint are one MoE layer, under one name for the families' many."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from scenarios.checkpoint_files import CheckpointError, TensorProblem

CORRECTION_BIAS: Final = "gate.e_score_correction_bias"
GATE_WEIGHT: Final = "gate.weight"
HASH_TABLE: Final = "gate.tid2eid"
FUSED_W13: Final = "experts.gate_up_proj"
FUSED_W2: Final = "experts.down_proj"
BLOCKED_W13: Final = "experts.gate_up_proj_blocks"
BLOCKED_W2: Final = "experts.down_proj_blocks"
SCALE: Final = "weight_scale_inv"

_LAYER_TENSOR: Final = re.compile(
    r"(?P<prefix>.*layers\.(?P<layer>\d+)\.(?:mlp|ffn|block_sparse_moe))\.(?P<rest>.+)"
)
_MOE_PARTS: Final = ("experts", "gate", "shared_experts")
_OTHER_SPELLINGS: Final[Mapping[str, str]] = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "shared_expert": "shared_experts",
    "weight_scale": SCALE,
    "scale": SCALE,
}
_PACKED: Final = "weight_packed"
# MiniMax-M2 keeps the bias beside the gate, DeepSeek-V4's own release calls it the gate's bias;
# gpt-oss calls the gate a router, whose bias is another thing.
_WHOLE_NAMES: Final[Mapping[str, str]] = {
    "e_score_correction_bias": CORRECTION_BIAS,
    "gate.bias": CORRECTION_BIAS,
    "router.weight": GATE_WEIGHT,
}
_WAYS_TO_HOLD_EXPERTS: Final = (
    r"experts\.\d+\..+",
    f"{re.escape(FUSED_W13)}|{re.escape(FUSED_W2)}",
    f"{re.escape(BLOCKED_W13)}|{re.escape(BLOCKED_W2)}",
)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The tensors of one MoE layer.

    prefix  what the names in the checkpoint share, e.g. ``model.layers.3.mlp``
    names   name below the prefix, ``gate_proj`` family -> full name in the checkpoint
    """

    prefix: str
    names: Mapping[str, str]


def family_name(rest: str) -> str:
    """A name below the prefix in the ``gate_proj`` family; names it does not know stay.

    Scales are all multiplied by, whatever their name; DeepSeek V4 calls them ``scale`` and stores
    no ``weight_scale_inv``. Kimi-K3's ``weight_packed`` is the matrix itself.
    """
    if rest in _WHOLE_NAMES:
        return _WHOLE_NAMES[rest]
    parts = [_OTHER_SPELLINGS.get(part, part) for part in rest.split(".")]
    return ".".join("weight" if part == _PACKED else part for part in parts)


def all_spellings(name: str) -> str:
    """``experts.0.up_proj.weight`` as ``experts.0.(up_proj|w3).weight``."""
    return ".".join(_spellings(part) for part in name.split("."))


def _spellings(known: str) -> str:
    others = [other for other, meant in _OTHER_SPELLINGS.items() if meant == known]
    return f"({'|'.join((known, *others))})" if others else known


def find_layer(files: Mapping[str, Path], layer: int, checkpoint: Path) -> LayerNames:
    """The MoE layer of that number.

    Args:
        files: every tensor of the checkpoint and its file.
        layer: position in the model.
        checkpoint: for messages.

    Raises:
        CheckpointError: no such layer, or two candidates for it or for one of its tensors; all
            of them are listed.
    """
    by_prefix = _moe_tensors(files, layer)
    if not by_prefix:
        raise _no_layer(files, layer, checkpoint)
    if len(by_prefix) > 1:
        several = f"one of several candidates for layer {layer}; wanted one prefix"
        samples = [min(full for _, full in named) for named in by_prefix.values()]
        raise _ambiguous(samples, several, files, checkpoint)
    ((prefix, named),) = by_prefix.items()
    rivals = _rivals(named)
    if rivals:
        several = "one of several names for the same weights; wanted one"
        raise _ambiguous(rivals, several, files, checkpoint)
    return LayerNames(prefix=prefix, names=dict(named))


def _moe_tensors(names: Iterable[str], layer: int) -> dict[str, list[tuple[str, str]]]:
    """Prefix -> (family name, full name) of all tensors below it, where some belong to a MoE."""
    by_prefix: dict[str, list[tuple[str, str]]] = {}
    for full in names:
        match = _LAYER_TENSOR.fullmatch(full)
        if match and int(match["layer"]) == layer:
            by_prefix.setdefault(match["prefix"], []).append((family_name(match["rest"]), full))
    return {prefix: named for prefix, named in by_prefix.items() if _has_moe(named)}


def _has_moe(named: Iterable[tuple[str, str]]) -> bool:
    """Layers of a vision tower and dense layers have the same prefixes, not the same parts."""
    return any(name.split(".")[0] in _MOE_PARTS for name, _ in named)


def _rivals(named: Iterable[tuple[str, str]]) -> list[str]:
    """Full names that claim to be what another one is too."""
    claims: dict[str, list[str]] = {}
    for name, full in named:
        claims.setdefault(name, []).append(full)
    rivals = [full for names in claims.values() if len(names) > 1 for full in sorted(names)]
    ways = [
        [names[0] for name, names in claims.items() if re.fullmatch(way, name)]
        for way in _WAYS_TO_HOLD_EXPERTS
    ]
    used = [names for names in ways if names]
    return rivals + (sorted(chain(*used)) if len(used) > 1 else [])


def _ambiguous(
    names: Iterable[str], message: str, files: Mapping[str, Path], checkpoint: Path
) -> CheckpointError:
    problems = [TensorProblem(str(files[name]), name, message) for name in names]
    return CheckpointError(str(checkpoint), problems)


def _no_layer(files: Iterable[str], layer: int, checkpoint: Path) -> CheckpointError:
    matches = [match for match in map(_LAYER_TENSOR.fullmatch, files) if match]
    there = sorted({int(m["layer"]) for m in matches if m["rest"].startswith("experts.")})
    have = f"layers with experts: {', '.join(map(str, there))}" if there else "no layer has experts"
    dense = [match[0] for match in matches if int(match["layer"]) == layer]
    only = f"; of that layer it holds {', '.join(dense)}" if dense else ""
    wanted = f"*layers.{layer}.(mlp|ffn|block_sparse_moe).experts.*"
    problem = TensorProblem(str(checkpoint), wanted, f"no such tensor{only}; {have}")
    return CheckpointError(str(checkpoint), [problem])
