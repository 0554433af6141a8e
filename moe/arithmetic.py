"""What a backend declares about its own arithmetic; every band is derived from this."""

from dataclasses import dataclass

FP32_ROUNDOFF = 2.0**-24
BF16_ROUNDOFF = 2.0**-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticModel:
    """How a backend sums products that are exact in fp32.

    accumulator_bits  bits of the running sum (24: fp32)
    scaled_block      K columns after which a partial sum is multiplied by its scales and added to
                      the total; None when scales are powers of two or absent, so multiply exactly
    transcendental_ulp  fp32 ulps by which an exp, log, sqrt or division may be off
    reciprocal_ulp      fp32 ulps by which a quantiser's 448 / amax may be off
    """

    accumulator_bits: int = 24
    scaled_block: int | None = None
    transcendental_ulp: float = 2.0
    reciprocal_ulp: float = 1.0

    def sum_error(self, terms: int) -> float:
        """Largest error of a sum of ``terms`` products, relative to the sum of their magnitudes.

        Holds for every order of summation: (n - 1) roundings, each at most half a last place.
        """
        unit = 2.0**-self.accumulator_bits
        if self.scaled_block is None:
            roundings = terms - 1
        else:
            blocks = -(-terms // self.scaled_block)
            scale_product_and_multiply = 2
            roundings = min(terms, self.scaled_block) - 1 + scale_product_and_multiply + blocks
        return compounded(roundings, unit)


def compounded(roundings: int, unit: float) -> float:
    """Relative error of ``roundings`` roundings in a row, higher orders included."""
    return roundings * unit / (1 - roundings * unit)
