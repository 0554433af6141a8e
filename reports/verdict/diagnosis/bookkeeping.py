"""Broken contracts and accounts, which have numbers and no rows: counts, ends, marks, padding."""

import math
from collections.abc import Iterator

import torch

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.deviation import Breach, Deviation
from reports.verdict.diagnosis.case import Scene
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice

COUNTS = ("num_recv_tokens_per_expert", "psum", "masked_m", "rows.masked_m", "restore.psum")


def contract_broken(scene: Scene, deviation: Deviation) -> Iterator[Explanation]:
    """What a contract's own numbers, and the values around them, say."""
    for law in (_count, _stale_count, _segments, _index, _scale_form, _padding_scales):
        found = law(scene, deviation)
        if found is not None:
            mistake, words = found
            yield Explanation(
                mistake=mistake,
                words=words,
                explains=torch.ones(1, dtype=torch.bool),
                evidence=_evidence(scene, deviation, mistake),
                is_guess=mistake is Mistake.PADDING_LEAK,  # what is padding, the rows' map says
            )


def _evidence(scene: Scene, deviation: Deviation, mistake: Mistake) -> float:
    """A broken contract says itself what it is; counts may be the forward before's by luck.

    As many counts as deviate had to be so, each one of 0 to what is due.
    """
    if mistake is not Mistake.STALE:
        return math.inf
    due = [
        int(one.want or 0)
        for one in scene.ledger.deviations
        if (one.stage, one.rank, one.tensor) == (deviation.stage, deviation.rank, deviation.tensor)
    ]
    return sum(bits_of_choice(count + 1) for count in due)


Law = tuple[Mistake, str] | None


def _count(scene: Scene, deviation: Deviation) -> Law:
    """A count or an end that is off by some rows."""
    if deviation.tensor not in COUNTS or deviation.got is None or deviation.want is None:
        return None
    if _is_of_the_round_before(scene, deviation):
        return None
    off = int(deviation.got - deviation.want)
    block = scene.subject.layer.row_alignment
    padded = -(-int(min(deviation.got, deviation.want)) // block) * block
    how = "too many" if off > 0 else "too few"
    words = f"{deviation.tensor} of expert {deviation.expert} counts {abs(off)} rows {how}"
    if abs(off) > 1 and padded == int(max(deviation.got, deviation.want)):
        words += f": its padding to {block} rows is {'counted' if off > 0 else 'left out'}"
    return Mistake.COUNTS, words


def _stale_count(scene: Scene, deviation: Deviation) -> Law:
    """A count that the forward before left."""
    if deviation.tensor not in COUNTS or not _is_of_the_round_before(scene, deviation):
        return None
    return Mistake.STALE, f"stale: {deviation.tensor} is what the forward before left"


def _is_of_the_round_before(scene: Scene, deviation: Deviation) -> bool:
    """Whether a whole tensor has not changed, though it should have."""
    if scene.earlier is None:
        return False
    now, before = (
        subject.stage(deviation.stage, deviation.rank).get(deviation.tensor)
        for subject in (scene.subject, scene.earlier)
    )
    return now is not None and before is not None and torch.equal(now, before)


def _segments(scene: Scene, deviation: Deviation) -> Law:
    """Rows of segments with other experts, or another mark for none, than their place says."""
    if (deviation.stage, deviation.tensor) != (Stage.PRE_PERMUTE, "rows.m_indices"):
        return None
    subject = scene.subject
    held = subject.slot_of_row[deviation.rank]
    placed = subject.placed[deviation.rank]
    if not torch.equal(held[placed.row], placed.local):
        return Mistake.COUNTS, "segments of grouped rows are not where their routes are"
    is_padding = torch.ones(len(held), dtype=torch.bool)
    is_padding[placed.row] = False
    marked = int((held[is_padding] < 0).sum())
    words = f"padding of segments has the other mark: {marked} rows of -1, "
    return Mistake.IDS, f"{words}{int(is_padding.sum()) - marked} with an expert's id"


def _index(scene: Scene, deviation: Deviation) -> Law:
    """The way back leads to a row that no route of this rank has."""
    is_index = deviation.tensor in ("restore.output_index", "rows.live_rows")
    if deviation.stage is not Stage.PRE_PERMUTE or not is_index:
        return None
    restore = scene.subject.stage(Stage.PRE_PERMUTE, deviation.rank)
    ids, index = restore.get("restore.topk_ids"), restore.get("restore.output_index")
    if ids is None or index is None:
        return None
    due = scene.subject.view.combined(scene.subject, deviation.rank)[0]
    extra = int((index >= 0).sum()) - len(scene.subject.routes[deviation.rank].rows)
    if extra <= 0:
        return None
    return (
        Mistake.PADDING_LEAK,
        f"padding counted as a route: {extra} slots without a route here have a grouped row, "
        f"{len(due)} are added up",
    )


def _scale_form(scene: Scene, deviation: Deviation) -> Law:
    """Scales of another dtype or shape than the reader takes."""
    if deviation.breach is not Breach.FORM_OF_SCALES:
        return None
    return Mistake.SCALE_FORM, f"another form of scales than is read: {deviation.detail}"


def _padding_scales(scene: Scene, deviation: Deviation) -> Law:
    """Padding that should be zero."""
    if deviation.breach is not Breach.ZERO_PADDING:
        return None
    return Mistake.PADDING_LEAK, f"{deviation.tensor}: {deviation.detail}"
