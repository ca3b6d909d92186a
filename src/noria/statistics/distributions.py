"""Distributions as counts: histograms with fixed edges, and counters of categories with a limit.

Histograms of several processes merge exactly, because every process has the same edges. Comparisons read both kinds
through `cells`: counts by name. `drift.py` compares them.
"""

import bisect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from noria.errors import short_repr

OTHER = "other"
MAX_CATEGORIES = 64  # categories of one variable that are compared, or have time series
MAX_NAMES = 500  # names of one variable, of some 100 bytes each
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
    """Counts by category. Of more than twice `max_names`, the most frequent keep their names; the rest is "other".

    So hostile names take no memory, and counts of several processes merge in any order: `missed` bounds what a name has
    lost (a mergeable summary: Misra and Gries, 1982; Agarwal et al., 2012). Up to twice `max_names`, counts are exact.
    """

    max_names: int = MAX_NAMES
    counts: dict[str, int] = {}
    other: int = 0
    missed: int = 0  # values of one name that are in `other`, at most

    @property
    def total(self) -> int:
        """Everything counted."""
        return sum(self.counts.values()) + self.other

    def record(self, category: str, count: int = 1) -> None:
        """Count a category, by `category_name`."""
        category = category_name(category)
        if category == OTHER:
            self.other += count
            return
        self.counts[category] = self.counts.get(category, 0) + count
        if len(self.counts) > 2 * self.max_names:
            self._drop_names()

    def merge(self, other: "CategoryCounts") -> "CategoryCounts":
        """Return the sums of both."""
        merged = CategoryCounts(
            max(self.max_names, other.max_names),
            add_counts(self.counts, other.counts),
            self.other + other.other,
            self.missed + other.missed,
        )
        if len(merged.counts) > 2 * merged.max_names:
            merged._drop_names()
        return merged

    def _drop_names(self) -> None:
        """Let only the most frequent names keep their counts."""
        ranked = most_frequent(self.counts)
        dropped = [self.counts[name] for name in ranked[self.max_names :]]
        self.counts = {name: self.counts[name] for name in ranked[: self.max_names]}
        self.other += sum(dropped)
        self.missed += dropped[0]

    def knows(self, name: str) -> bool:
        """Whether its count of a name is right, to about 5 %; also of a name that it has not, if it has them all."""
        if name in self.counts:
            return self.counts[name] >= 20 * self.missed
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether a name that it has not was not counted."""
        return not self.missed

    def only(self, names: Collection[str]) -> "CategoryCounts":
        """Return the counts of these names; the rest is "other"."""
        counts = {name: count for name, count in self.counts.items() if name in names}
        return CategoryCounts(self.max_names, counts, self.total - sum(counts.values()))

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


def most_frequent(counts: Mapping[str, int]) -> list[str]:
    """Return the names by count, the largest first, and of equal ones by name."""
    return sorted(counts, key=lambda name: (-counts[name], name))


def add_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum for each name."""
    sums: dict[str, int] = {}
    for name, count in itertools.chain.from_iterable(each.items() for each in counts):
        sums[name] = sums.get(name, 0) + count
    return sums
