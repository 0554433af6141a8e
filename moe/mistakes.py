"""Kinds of mistake that a diagnosis can name; each fault says which of them it is."""

from enum import StrEnum


class Mistake(StrEnum):
    """What went wrong, in the words of a diagnosis."""

    SCALING_FACTOR = "scaling_factor"
    """routed_scaling_factor applied 0 times, twice or as its inverse."""

    SHARED_EXPERT = "shared_expert"
    """The shared expert counted n or 1/n times, or not at all."""

    PARTIAL_MISSING = "partial_missing"
    """A rank's partial sum left out."""

    PARTIAL_DOUBLED = "partial_doubled"
    """A rank's partial sum counted twice."""

    PARTIAL_OF_ANOTHER_RANK = "partial_of_another_rank"
    """A rank's partial sum in place of another's."""

    SUM_REPEATED = "sum_repeated"
    """A finished sum added up over the ranks again."""

    SUM_MISSING = "sum_missing"
    """A partial sum passed on as if it were the sum over the ranks."""

    ROWS_MISPLACED = "rows_misplaced"
    """Rows, or parts of them, exchanged or shifted; the diagnosis says whose they are."""

    STALE = "stale"
    """What the forward before left."""

    WRONG_EXPERT = "wrong_expert"
    """Another expert's weights."""

    GATE_UP_SWAPPED = "gate_up_swapped"
    """Gate and up exchanged or interleaved."""

    ACTIVATION = "activation"
    """A clamp missing or in the wrong place, or another formula."""

    TOPK_WEIGHTS = "topk_weights"
    """Top-k weights applied 0 times, twice, rounded, or from another slot; normalised or not."""

    SCALE_EXPONENT = "scale_exponent"
    """Scales off by powers of two; the diagnosis says how far and which block."""

    SCALE_LATE = "scale_late"
    """A scale rounded up after quantising by the exact one."""

    SCALE_DONOR = "scale_donor"
    """Scales that belong to another row or block."""

    SCALE_FORM = "scale_form"
    """Scales of another format, layout or packing than the reader takes."""

    SCALE_FLOOR = "scale_floor"
    """A group of zeros quantised without the least magnitude that keeps its scale from zero."""

    PADDING_LEAK = "padding_leak"
    """Padding read as if it were data, or left with what nobody may read."""

    TAIL_COLUMNS = "tail_columns"
    """Columns of a tile, or past it, lost or overwritten."""

    TAIL_ROWS = "tail_rows"
    """Rows past a tile, a segment or a launch lost or overwritten."""

    ROUTES_LOST = "routes_lost"
    """Routes dropped that should have been computed, or computed that should not."""

    COUNTS = "counts"
    """Counts, offsets or segment ends that do not fit the routes."""

    IDS = "ids"
    """Expert ids of another id space, or another mark for no route."""

    EXPERT_CHOICE = "expert_choice"
    """The router chose by another rule."""

    COLLECTIVE = "collective"
    """A collective left out, of another group, or with other sizes."""
