"""What a quantiser that went wrong did to its values, in words: by how much, and whose scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.golden import E4M3_MAX, Quantized, round_e4m3
from reports.verdict.rows import Rows

ALIKE = 0.99
"""Share of codes that must be another quantiser's for it to be named."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantiserNote:
    """Words for the wrong groups of some rows.

    rows      coordinates of R rows
    codes     [R, C] float64 that the run has
    scale     [R, G] float64 that the run has
    want      the golden's
    is_wrong  [R, G] bool: groups with a code or a scale that the golden could not have
    """

    rows: Rows
    codes: Tensor
    scale: Tensor
    want: Quantized
    is_wrong: Tensor

    def __call__(self, here: Tensor) -> str:
        """About the rows at these places [N]; empty if there is nothing to say."""
        said = (self._size(here), self._late(here), self._exponent(here), self._donor(here))
        return "; ".join(words for words in said if words)

    def _grouped(self, cells: Tensor) -> Tensor:
        """[R, C] as [R, G, C / G]."""
        return cells.view(*self.scale.shape, -1)

    def _size(self, here: Tensor) -> str:
        """How much larger or smaller values came out, over the wrong groups."""
        wrong = self.is_wrong[here]
        scale, due_scale = self.scale[here][..., None], self.want.scale[here][..., None]
        source = (self._grouped(self.want.scaled)[here] * due_scale)[wrong]
        got = (self._grouped(self.codes)[here] * scale)[wrong]
        due = (self._grouped(self.want.codes)[here] * due_scale)[wrong]
        power = (source * source).sum(1)
        factor = ((got * source).sum(1) / power)[power > 0]
        if not len(factor) or not bool(got.isfinite().all()):
            return ""
        error, least = ((x - source).norm() / source.norm() for x in (got, due))
        farthest = factor[factor.abs().log().abs().argmax()]
        return (
            f"wrong groups: {len(factor)}, {float(factor.mean()):.4g} times their size on average, "
            f"{float(farthest):.4g} at the farthest; their relative error is {float(error):.2g}, "
            f"quantising costs {float(least):.2g}"
        )

    def _late(self, here: Tensor) -> str:
        """Codes of the largest magnitude itself under a scale that was rounded up."""
        wrong = self.is_wrong[here] & (self.scale[here] == self.want.scale[here])
        scaled = self._grouped(self.want.scaled)[here][wrong]
        amax = scaled.abs().amax(1, keepdim=True) if len(scaled) else scaled
        exact = round_e4m3(scaled * E4M3_MAX / amax)
        alike = self._grouped(self.codes)[here][wrong] == exact
        if not alike.numel() or float(alike.double().mean()) < ALIKE:
            return ""
        return "the codes are those of the scale before it was rounded up"

    def _exponent(self, here: Tensor) -> str:
        """One factor between the scales that are there and those that are due."""
        differs = self.scale[here] != self.want.scale[here]
        ratio = (self.scale[here] / self.want.scale[here])[differs]
        if not len(ratio) or not bool((ratio == ratio[0]).all()) or not bool(ratio[0].isfinite()):
            return ""
        return f"every wrong scale is {float(ratio[0]):.6g} times what is due"

    def _donor(self, here: Tensor) -> str:
        """The row, or the block of columns, whose scales are found in the first wrong row."""
        differs = (self.scale != self.want.scale)[here].any(1).nonzero()[:, 0]
        if not len(differs):
            return ""
        at = int(here[differs[0]])
        like = (self.want.scale == self.scale[at]).all(1).nonzero()[:, 0]
        like = like[self.rows.rank[like] == self.rows.rank[at]]
        if len(like) == 1:
            return f"the scales of {self._name(at)} are those of {self._name(int(like[0]))}"
        return self._block_donor(at)

    def _block_donor(self, at: int) -> str:
        """A single distance to the blocks whose scales a row's wrong blocks have."""
        got, due = self.scale[at], self.want.scale[at]
        wrong = (got != due).nonzero()[:, 0]
        blocks = torch.arange(len(due))
        distances = [
            step
            for step in range(1, len(due))
            if bool((got[wrong] == due[(blocks[wrong] + step) % len(due)]).all())
        ]
        if len(distances) != 1 or len(set(due[wrong].tolist())) < min(2, len(wrong)):
            return ""
        first = int(wrong[0])
        donor = (first + distances[0]) % len(due)
        return f"the scale of block {first} of {self._name(at)} is that of its block {donor}"

    def _name(self, at: int) -> str:
        """A row by its token and slot."""
        token, slot = int(self.rows.token[at]), int(self.rows.slot[at])
        return f"token {token}" + (f" slot {slot}" if slot >= 0 else "")
