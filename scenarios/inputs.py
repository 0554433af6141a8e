"""Tokens of a scenario, drawn or read, and who gets which; the rank never enters a draw."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe.batch import Batch, LayerInput
from moe.random_tensors import integers, normal, seeded
from scenarios.errors import InputError
from topology.sync import PADDING, SyncPlan


def random_hidden_states(
    seed: int, num_tokens: int, hidden_size: int, name: str = "hidden_states"
) -> Tensor:
    """[T, H] bf16: the global token list, normal, drawn token after token."""
    return normal(seeded(seed, name), num_tokens, hidden_size)


def captured_hidden_states(path: Path, num_tokens: int, hidden_size: int) -> Tensor:
    """[T, H] bf16 read from ``hidden_states`` of a safetensors file.

    Raises:
        InputError: unreadable file, missing tensor, another shape or dtype, or values that are no
            numbers.
    """
    hidden_states = _captured(path, "hidden_states")
    if tuple(hidden_states.shape) != (num_tokens, hidden_size):
        raise InputError(
            f"{path}: hidden_states is {list(hidden_states.shape)}; batch.tokens and the model "
            f"want [{num_tokens}, {hidden_size}]"
        )
    if hidden_states.dtype != torch.bfloat16:
        raise InputError(f"{path}: hidden_states is {hidden_states.dtype}; bf16 is wanted")
    numbers = hidden_states.isfinite().all(dim=1)
    if not bool(numbers.all()):
        first = int((~numbers).nonzero()[0])
        raise InputError(f"{path}: token {first} of hidden_states holds NaN or infinity")
    return hidden_states


def captured_input_ids(path: Path, num_tokens: int, vocab_size: int) -> Tensor:
    """[T] int64 read from ``input_ids`` of a safetensors file.

    Raises:
        InputError: unreadable file, missing tensor, another shape, no integers, or ids outside the
            vocabulary.
    """
    ids = _captured(path, "input_ids")
    if tuple(ids.shape) != (num_tokens,) or ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{path}: input_ids is {list(ids.shape)} {ids.dtype}; "
            f"[{num_tokens}] integers are wanted"
        )
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        first = int(outside[0])
        raise InputError(f"{path}: token {first} has id {int(ids[first])} of {vocab_size}")
    return ids.to(torch.int64)


def _captured(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            if name not in names:
                raise InputError(f"{path}: no tensor {name}; it holds {', '.join(names)}")
            captured: Tensor = tensors.get_tensor(name)
            return captured
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error


def input_ids(seed: int, num_tokens: int, vocab_size: int) -> Tensor:
    """[T] int64 vocabulary ids of the global token list."""
    return integers(seeded(seed, "input_ids"), 0, vocab_size, num_tokens)


def deal(batch: Batch, sync: SyncPlan, padding_seed: int = 0) -> list[LayerInput]:
    """What each rank is handed: the tokens of its rows.

    Padding rows hold numbers of their own, drawn, so that one that reaches a token shows; they
    carry vocabulary id 0 and no pinned route.

    Args:
        batch: the global token list.
        sync: which token stands in which row of which rank.
        padding_seed: of the padding rows; the rank never enters.
    """
    most = max((rows.count(PADDING) for rows in sync.entry), default=0)
    width = batch.hidden_states.shape[1]
    padding = random_hidden_states(padding_seed, most, width, "padding")
    padding = padding.to(batch.hidden_states.device)
    return [
        _dealt_to(batch, padding, entry, layer)
        for entry, layer in zip(sync.entry, sync.layer, strict=True)
    ]


def _dealt_to(
    batch: Batch, padding: Tensor, entry: Sequence[int], layer: Sequence[int]
) -> LayerInput:
    device = batch.hidden_states.device
    own, at = (torch.tensor(rows, dtype=torch.int64, device=device) for rows in (entry, layer))
    hidden_states = take_tokens(batch.hidden_states, own, 0)
    assert hidden_states is not None
    hidden_states[own == PADDING] = padding[: int((own == PADDING).sum())]
    return LayerInput(
        hidden_states=hidden_states,
        input_ids=take_tokens(batch.input_ids, own, 0),
        topk_ids=take_tokens(batch.topk_ids, at, -1),
        topk_weights=take_tokens(batch.topk_weights, at, 0),
    )


def take_tokens(values: Tensor | None, tokens: Tensor, filler: int) -> Tensor | None:
    """Rows of these tokens, ``filler`` where there is none; None of None."""
    if values is None:
        return None
    taken = values.new_full((len(tokens), *values.shape[1:]), filler)
    real = tokens != PADDING
    taken[real] = values[tokens[real]]
    return taken
