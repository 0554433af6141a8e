"""Which tensors of a checkpoint are one MoE layer, under one name for the families' many."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scenarios.checkpoint_files import CheckpointError, TensorProblem

CORRECTION_BIAS: Final = "gate.e_score_correction_bias"
GATE_WEIGHT: Final = "gate.weight"
HASH_TABLE: Final = "gate.tid2eid"
FUSED_W13: Final = "experts.gate_up_proj"
FUSED_W2: Final = "experts.down_proj"

_LAYER_TENSOR: Final = re.compile(
    r"(?P<prefix>.*layers\.(?P<layer>\d+)\.(?:mlp|ffn|block_sparse_moe))\.(?P<rest>.+)"
)
_MOE_PARTS: Final = ("experts", "gate", "shared_experts")
_OTHER_SPELLINGS: Final[Mapping[str, str]] = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "shared_expert": "shared_experts",
}
# MiniMax-M2 keeps the bias beside the gate, DeepSeek-V4's own release calls it the gate's bias.
_OTHER_BIASES: Final = ("e_score_correction_bias", "gate.bias")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The tensors of one MoE layer.

    prefix  what the names in the checkpoint share, e.g. ``model.layers.3.mlp``
    names   name below the prefix, ``gate_proj`` family -> full name in the checkpoint
    """

    prefix: str
    names: Mapping[str, str]


def family_name(rest: str) -> str:
    """A name below the prefix in the ``gate_proj`` family; names it does not know stay."""
    if rest in _OTHER_BIASES:
        return CORRECTION_BIAS
    return ".".join(_OTHER_SPELLINGS.get(part, part) for part in rest.split("."))


def all_spellings(name: str) -> str:
    """``experts.0.up_proj.weight`` as ``experts.0.(up_proj|w3).weight``."""
    spelled = name.split(".")
    for other, known in _OTHER_SPELLINGS.items():
        spelled = [f"({known}|{other})" if part == known else part for part in spelled]
    return ".".join(spelled)


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
    fused = [names[0] for name, names in claims.items() if name in (FUSED_W13, FUSED_W2)]
    single = [names[0] for name, names in claims.items() if re.match(r"experts\.\d+\.", name)]
    return rivals + (sorted(fused + single) if fused and single else [])


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
