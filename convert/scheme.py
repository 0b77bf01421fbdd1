"""What grid a linear layer is rounded to: bits, group size, symmetric or not."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Scheme:
    """An integer grid with one scale and one zero point for every `group_size` input columns of a row.

    bits: 2, 3, 4 or 8. group_size: columns a group, -1 for the whole row. sym: the zero point is 2**(bits-1).
    min_zero: the smallest zero point allowed (1 for GPTQ v1 files, which store z - 1 and are read differently at 0).
    """

    bits: int
    group_size: int
    sym: bool
    min_zero: int = 0

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def mid(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def scale_bits(self) -> int:
        """Significant bits kept in a scale.

        A code difference has at most 4 bits up to 4-bit grids, so with 7 the product (q - z) * s, and q * s and z * s
        as well, has at most 11: exact in float16, whatever order a reader computes it in.
        """
        return 7 if self.bits <= 4 else 11

    def group(self, width: int) -> int:
        """Columns a group for a row of `width` columns."""
        return width if self.group_size <= 0 else self.group_size

    def with_group(self, group_size: int) -> Scheme:
        """The same grid with another group size."""
        return replace(self, group_size=group_size)


STANDARD_GROUPS = (1024, 512, 256, 128, 64, 32, 16)


def fit_group(widths: list[int], group_size: int) -> int | None:
    """The largest usable group of at most `group_size` columns that divides every width, or None.

    Powers of two from 16 up come first, because every reader knows them; then any common divisor of at least 16.
    """
    if group_size <= 0:
        return -1
    if all(width % group_size == 0 for width in widths):
        return group_size
    candidates = [g for g in STANDARD_GROUPS if g <= group_size] + list(range(group_size, 15, -1))
    return next((g for g in candidates if all(width % g == 0 for width in widths)), None)
