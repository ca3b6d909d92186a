"""Whether a quantity stays flat: its growth over the second half of a run, by a robust slope. Pure.

The slope is Theil's and Sen's: the median of the slopes between all pairs of samples, which peaks do not change.
"""

from collections.abc import Sequence

from msgspec import Struct
from scipy import stats

_MEGABYTE = 2**20
# The growth that is allowed over the second half: a share of the median, or this much; the larger of the two.
BOUNDS = {
    "PSS": (0.05, 16.0 * _MEGABYTE),
    "RSS": (0.05, 16.0 * _MEGABYTE),
    "files": (0.1, 8.0),
    "threads": (0.0, 2.0),
    "connections": (0.1, 8.0),
    "bytes": (0.1, 2.0 * _MEGABYTE),
}
"""By the last word of a quantity's name."""


class Flatness(Struct, frozen=True):
    """The growth of one quantity over the second half of a run, in its own unit."""

    quantity: str
    median: float
    growth: float  # the slope times the length of the second half
    allowed_growth: float

    @property
    def is_flat(self) -> bool:
        """Whether it has grown no more than is allowed."""
        return self.growth <= self.allowed_growth


def flatness(quantity: str, at_s: Sequence[float], values: Sequence[float | None]) -> Flatness | None:
    """Return the flatness of a quantity; None if it has less than two values in the second half."""
    middle_s = (at_s[0] + at_s[-1]) / 2
    known = [(at, value) for at, value in zip(at_s, values, strict=True) if at >= middle_s and value is not None]
    if len(known) < 2:
        return None
    slope, _, _, _ = stats.theilslopes([value for _, value in known], [at for at, _ in known])
    median = sorted(value for _, value in known)[len(known) // 2]
    share, least = BOUNDS[quantity.rpartition(" ")[2]]
    growth = float(slope) * (known[-1][0] - known[0][0])
    return Flatness(quantity, median, round(growth, 2), max(share * median, least))
