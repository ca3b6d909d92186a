"""Whether a quantity stays flat: its growth in the second half of a run, by a robust slope. Pure.

The slope is Theil's and Sen's: the median of the slopes between all pairs of samples, which peaks do not change. It is
stated for an hour, and so are the bounds, so that runs of any length judge alike.
"""

from collections.abc import Sequence

from msgspec import Struct
from scipy import stats

_MEGABYTE = 2**20
_SECONDS_PER_HOUR = 3600.0
# The growth in an hour that is allowed: a share of the median, or this much; the larger of the two. Of memory, a front
# end that had run for 7.5 minutes still grew by 38 MiB an hour, with its caches.
BOUNDS = {
    "PSS": (0.1, 64.0 * _MEGABYTE),
    "RSS": (0.1, 64.0 * _MEGABYTE),
    "files": (0.2, 16.0),
    "threads": (0.0, 4.0),
    "connections": (0.2, 16.0),
    "bytes": (0.2, 4.0 * _MEGABYTE),
}
"""By the last word of a quantity's name."""


class Flatness(Struct, frozen=True):
    """The growth of one quantity in the second half of a run, in its own unit."""

    quantity: str
    median: float
    growth_per_h: float
    allowed_per_h: float

    @property
    def is_flat(self) -> bool:
        """Whether it has grown no more than is allowed."""
        return self.growth_per_h <= self.allowed_per_h


def flatness(quantity: str, at_s: Sequence[float], values: Sequence[float | None]) -> Flatness | None:
    """Return the flatness of a quantity; None if it has less than two values in the second half."""
    middle_s = (at_s[0] + at_s[-1]) / 2
    known = [(at, value) for at, value in zip(at_s, values, strict=True) if at >= middle_s and value is not None]
    if len(known) < 2:
        return None
    slope, _, _, _ = stats.theilslopes([value for _, value in known], [at for at, _ in known])
    median = sorted(value for _, value in known)[len(known) // 2]
    share, least = BOUNDS[quantity.rpartition(" ")[2]]
    growth_per_h = round(float(slope) * _SECONDS_PER_HOUR, 2)
    return Flatness(quantity, median, growth_per_h, max(share * median, least))
