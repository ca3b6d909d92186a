"""Distributions as counts: histograms with fixed edges, and counters of categories with a limit.

Counts of several processes merge exactly, because every process has the same edges. Comparisons read both kinds through
`cells`: counts by name. `drift.py` compares them.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from noria.errors import short_repr

OTHER = "other"
MAX_CATEGORIES = 64  # of one variable; a time series and some 100 bytes each
_MAX_CATEGORY_CHARS = 100


class Histogram(Struct, tag="histogram"):
    """Counts of values between fixed edges. Cell k has the values in (edges[k − 1], edges[k]], the last has the rest.

    Cells are closed on the right, as Prometheus' label `le` means it; numpy's are closed on the left.
    """

    edges: tuple[float, ...]  # ascending, finite
    counts: list[int] = []  # one more than edges
    sum: float = 0.0
    num_invalid: int = 0  # NaN or infinite; in no cell

    def __post_init__(self) -> None:
        """Raises ValueError if the edges are no edges, or the counts do not fit them."""
        check_edges(self.edges)
        if not self.counts:
            self.counts = [0] * (len(self.edges) + 1)
        if len(self.counts) != len(self.edges) + 1 or min(self.counts) < 0:
            raise ValueError(
                f"{short_repr(self.counts)}; {len(self.edges)} edges need {len(self.edges) + 1} counts of 0 or more"
            )

    @property
    def total(self) -> int:
        """Values in all cells."""
        return sum(self.counts)

    def record(self, value: float) -> None:
        """Count one value."""
        if not math.isfinite(value):
            self.num_invalid += 1
            return
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.sum += value

    def merge(self, other: "Histogram") -> "Histogram":
        """Return the histogram of all values of both. Raises ValueError if their edges differ."""
        check_same_edges(self, other)
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.edges, counts, self.sum + other.sum, self.num_invalid + other.num_invalid)

    def cumulative(self) -> list[int]:
        """Counts of values up to each edge and of all values, as Prometheus' buckets have them."""
        return list(itertools.accumulate(self.counts))

    def cells(self) -> dict[str, int]:
        """Counts by upper edge, without empty cells."""
        names = [*(f"{edge:g}" for edge in self.edges), "+Inf"]
        return {name: count for name, count in zip(names, self.counts, strict=True) if count}


def cell_name(edges: Sequence[float], value: float) -> str:
    """Return the name in `Histogram.cells` of the cell that a finite value is in."""
    index = bisect.bisect_left(edges, value)
    return f"{edges[index]:g}" if index < len(edges) else "+Inf"


def check_edges(edges: Sequence[float]) -> None:
    """Raise ValueError unless `edges` are one or more ascending finite numbers."""
    if not edges or not all(map(math.isfinite, edges)) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"{short_repr(edges)}; edges are one or more finite numbers, each above the one before")


def check_same_edges(first: Histogram, second: Histogram) -> None:
    """Raise ValueError if the edges differ."""
    if first.edges != second.edges:
        raise ValueError(
            f"histograms with the edges {short_repr(first.edges)} and {short_repr(second.edges)} cannot be merged or "
            "compared; a variable needs the same edges everywhere"
        )


def category_name(text: str) -> str:
    """Return the name by which a category is counted: its first 100 characters."""
    return text[:_MAX_CATEGORY_CHARS]


class CategoryCounts(Struct, tag="categories"):
    """Counts of at most `max_categories` categories; later ones count as "other", so hostile names take no memory."""

    max_categories: int = MAX_CATEGORIES
    counts: dict[str, int] = {}
    other: int = 0

    @property
    def total(self) -> int:
        """Everything counted."""
        return sum(self.counts.values()) + self.other

    def record(self, category: str, count: int = 1) -> None:
        """Count a category, by `category_name`."""
        category = category_name(category)
        if category in self.counts or (len(self.counts) < self.max_categories and category != OTHER):
            self.counts[category] = self.counts.get(category, 0) + count
        else:
            self.other += count

    def merge(self, other: "CategoryCounts") -> "CategoryCounts":
        """Return the sums of both. Of more categories than the limit, the most frequent keep their names."""
        merged = CategoryCounts(self.max_categories, {}, self.other + other.other)
        sums = add_counts(self.counts, other.counts)
        for category in sorted(sums, key=lambda name: (-sums[name], name)):
            merged.record(category, sums[category])
        return merged

    def cells(self) -> dict[str, int]:
        """Counts by category, "other" among them if there are any."""
        return self.counts | ({OTHER: self.other} if self.other else {})


Counts = Histogram | CategoryCounts


def merge_counts(first: Counts, second: Counts) -> Counts:
    """Return the counts of both. Raises ValueError if they are not of one variable."""
    if isinstance(first, Histogram) and isinstance(second, Histogram):
        return first.merge(second)
    if isinstance(first, CategoryCounts) and isinstance(second, CategoryCounts):
        return first.merge(second)
    raise ValueError("a histogram and counts of categories cannot be merged")


def add_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum for each name."""
    sums: dict[str, int] = {}
    for name, count in itertools.chain.from_iterable(each.items() for each in counts):
        sums[name] = sums.get(name, 0) + count
    return sums
