"""Numbers and foreign text as a reader sees them. Nothing here decides anything."""

import math
import unicodedata
from collections.abc import Iterable

from markupsafe import Markup

DIRECTION_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def visible(text: object, limit: int = 400) -> str:
    r"""``text`` cut to ``limit`` characters, with control characters spelled out as ``\u202e``.

    Line breaks and tabs stay. The result is plain text: the template still escapes it.
    """
    whole = str(text)
    shown = whole if len(whole) <= limit else f"{whole[:limit]}… ({len(whole):,} characters)"
    return "".join(_spelled(char) for char in shown)


def _spelled(char: str) -> str:
    hidden = char in DIRECTION_CONTROLS or unicodedata.category(char) in ("Cc", "Cs")
    return f"\\u{ord(char):04x}" if hidden and char not in "\n\t" else char


def isolated(text: object, limit: int = 400) -> Markup:
    """``visible`` text as HTML that cannot reorder or close what stands around it."""
    return Markup("<bdi>{}</bdi>").format(visible(text, limit))


def number(value: float | None, digits: int = 6) -> str:
    """A value in full sight; a dash where there is none."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.{digits}g}"


def cell_number(value: float | None) -> str:
    """At most four characters, for a cell of the stage map: ``.61``, ``2.4``, ``180``, ``3e5``."""
    if value is None or not math.isfinite(value):
        return "" if value is None else number(value)
    if value < 0.005:
        return "0" if value == 0 else "<.01"
    if value < 1:
        return f"{min(value, 0.99):.2f}".lstrip("0")  # under the limit reads as under it
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 9999 else f"{value:.0e}".replace("e+0", "e").replace("+", "")


def byte_count(size: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def ranges(numbers: Iterable[int]) -> str:
    """Integers as runs: ``0-3, 5``."""
    runs: list[tuple[int, int]] = []
    for value in sorted(set(numbers)):
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
