"""What others call a value or a switch, and its name here, where spelling does not tell."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moe.formats import DispatchFormat, GemmLayout, Phase, Platform, QuantRecipe
from scenarios.errors import KeyPath, dotted
from scenarios.sections import SwitchesSpec


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a value.

    key      where the value stands, dotted
    pattern  matches the whole name, in any case
    meant    what it may stand for here
    """

    key: str
    pattern: str
    meant: tuple[str, ...]


ALIASES: Final = (
    Alias("platform", r"g?h\d+|hopper", (Platform.SM90,)),
    Alias("platform", r"g?b\d+|blackwell", (Platform.SM100,)),
    Alias("platform", r"rtx([ _-]?(pro|50).*)?", (Platform.SM120,)),
    Alias(
        "moe.dispatcher",
        r"deep_?ep",
        (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL),
    ),
    Alias("moe.recipe", r"fp8|fp8_block|float8", (QuantRecipe.FP8_BLOCK128,)),
    Alias("batch.phase", r"prefill", (Phase.EXTEND,)),
    Alias("moe.layout", r"contig|contiguous", (GemmLayout.CONTIG,)),
)
"""The first row that matches holds."""

_UPSTREAM_NAME: Final = re.compile(r"SGLANG_\w+|--[a-z-]+")


def meant_values(path: KeyPath, value: object, options: Sequence[str]) -> tuple[str, ...]:
    """The options that a value stands for at a key; empty if nothing is known of it."""
    if not isinstance(value, str):
        return ()
    if same := tuple(option for option in options if option.casefold() == value.casefold()):
        return same
    for alias in ALIASES:
        if alias.key == dotted(path) and re.fullmatch(alias.pattern, value, re.IGNORECASE):
            return alias.meant
    return ()


def meant_switch(word: object) -> str | None:
    """The key of the switch that SGLang calls so, or None.

    An environment variable or an option of the server, as the switch's own docstring names it.
    """
    wanted = str(word).strip("-").replace("-", "_").casefold()
    for switch, field in SwitchesSpec.model_fields.items():
        if any(_is_named(wanted, name) for name in _upstream_names(field.description or "")):
            return f"moe.switches.{switch}"
    return None


def _upstream_names(docstring: str) -> Iterator[str]:
    for name in _UPSTREAM_NAME.findall(docstring):
        yield name.strip("-").replace("-", "_").casefold()


def _is_named(wanted: str, name: str) -> bool:
    """The same name, or one that goes on where a docstring cuts it short with an underscore."""
    return wanted == name or (name.endswith("_") and wanted.startswith(name))
