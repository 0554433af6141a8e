"""How far the values of a quantiser that went wrong are off, in words."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.golden import Quantized


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantiserNote:
    """Codes and scales of R rows beside the golden's, with words for the wrong groups.

    codes     [R, C] float64 that the run has
    scale     [R, G] float64 that the run has
    want      the golden's
    noise     relative error declared in front of the rounding to a code
    is_wrong  [R, G] bool: groups with a code or a scale that the golden could not have
    """

    codes: Tensor
    scale: Tensor
    want: Quantized
    noise: float
    is_wrong: Tensor

    def at(self, rows: Tensor) -> "QuantiserNote":
        """Of some rows, [N] int64."""
        want = Quantized(
            scaled=self.want.scaled[rows], codes=self.want.codes[rows], scale=self.want.scale[rows]
        )
        return replace(
            self,
            codes=self.codes[rows],
            scale=self.scale[rows],
            want=want,
            is_wrong=self.is_wrong[rows],
        )

    def _grouped(self, cells: Tensor) -> Tensor:
        """[R, C] as [R, G, C / G]."""
        return cells.view(*self.scale.shape, cells.shape[-1] // self.scale.shape[-1])

    def __call__(self, here: Tensor) -> str:
        """How much larger or smaller values of the rows at [N] came out, over the wrong groups.

        Empty where nothing can be sized.
        """
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
