"""How much a variable's distribution differs from its reference: PSI, Jensen–Shannon, Kolmogorov–Smirnov, chi-square.

Each takes counts by cell, as `distributions.py` keeps them. These are measures and tests of one look, for gauges and
alerts. A canary is judged by e-processes instead (`judge.py`), because it is looked at many times.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from noria.statistics.distributions import (
    MAX_CATEGORIES,
    CategoryCounts,
    Histogram,
    add_counts,
    check_same_edges,
    most_frequent,
)

MIN_SAMPLES = 200
"""Of each side. Without drift the corrected PSI of ten cells exceeds 0.1 in 0.1 % of the cases with so many, and in
2.5 % with 100 (docs/benchmarks/canary.md)."""
_MIN_EXPECTED = 5.0  # the least expected count of a category, or of a cell of the chi-square test (Cochran, 1954)

Cells = Mapping[str, int]


class HypothesisTest(NamedTuple):
    """A test's statistic, and the probability of one as large without a difference."""

    statistic: float
    p_value: float


class Drift(Struct, frozen=True):
    """A distribution compared with its reference. What needs more samples, or another kind of variable, is None."""

    num_reference: int
    num_current: int
    psi: float | None = None  # corrected for sample size: about 0 without drift, also a little below
    js: float | None = None
    ks: float | None = None  # statistic of histograms
    p_value: float | None = None  # p-value of histograms by Kolmogorov–Smirnov, of categories by chi-square
    unseen: dict[str, int] = {}  # categories that the reference does not have, and their counts


def compare_histograms(reference: Histogram, current: Histogram) -> Drift:
    """Compare two histograms. Raises ValueError if their edges differ."""
    test = kolmogorov_smirnov(reference, current)
    if min(reference.total, current.total) < MIN_SAMPLES:
        return Drift(reference.total, current.total)
    mine, theirs = reference.cells(), current.cells()
    psi, js = corrected_psi(mine, theirs), jensen_shannon(mine, theirs)
    return Drift(reference.total, current.total, psi, js, test.statistic, test.p_value)


def compare_categories(reference: CategoryCounts, current: CategoryCounts) -> Drift:
    """Compare two counts of categories. Unseen ones are reported however few samples there are."""
    names = compared_names(reference, current)
    mine, theirs = (side.only(names).cells() for side in (reference, current))
    unseen = {name: count for name, count in current.counts.items() if not reference.counts.get(name)}
    unseen = unseen if reference.is_complete else {}  # else nobody knows
    if min(reference.total, current.total) < MIN_SAMPLES:
        return Drift(reference.total, current.total, unseen=unseen)
    psi, js, p_value = corrected_psi(mine, theirs), jensen_shannon(mine, theirs), chi_square(mine, theirs).p_value
    return Drift(reference.total, current.total, psi, js, None, p_value, unseen)


def compared_names(reference: CategoryCounts, current: CategoryCounts) -> set[str]:
    """Return the categories by which both sides are compared; the others are one cell, "other".

    Each is known to both sides, which expect five or more of its values. They are the most frequent ones of both
    together, which is fair: without drift, chance alone decides on which side a value is. The more values, the more
    they are, up to 64, so that the deviation of the corrected PSI without drift, √(2 · cells) (1/n + 1/m), is at most
    that of ten cells and `MIN_SAMPLES`.
    """
    both, num_values = add_counts(reference.counts, current.counts), min(reference.total, current.total)
    least = _MIN_EXPECTED * (reference.total + current.total) / max(num_values, 1)
    known = {name: n for name, n in both.items() if n >= least and reference.knows(name) and current.knows(name)}
    max_names = int(10 * max(1.0, num_values / MIN_SAMPLES) ** 2)
    return set(most_frequent(known)[: min(MAX_CATEGORIES, max_names)])


def psi(reference: Cells, current: Cells) -> float:
    """Return the population stability index Σ (q − p) ln(q / p), also known as Jeffreys' divergence.

    Half a count is added to every cell that either side has, so that an empty one does not make it infinite.
    """
    return sum((q - p) * math.log(q / p) for p, q in _smoothed_shares(reference, current))


def corrected_psi(reference: Cells, current: Cells) -> float:
    """Return the PSI less its mean without drift, (cells − 1)(1/n + 1/m); 0 if either side is empty.

    Without drift the PSI is about (1/n + 1/m) times a chi-square variable of cells − 1 degrees of freedom (Yurdakul,
    "Statistical properties of population stability index", 2018), so small samples raise the raw PSI.
    """
    n, m = sum(reference.values()), sum(current.values())
    if not n or not m:
        return 0.0
    num_cells = len(_names(reference, current))
    return psi(reference, current) - (num_cells - 1) * (1 / n + 1 / m)


def jensen_shannon(reference: Cells, current: Cells) -> float:
    """Return the Jensen–Shannon divergence in bits, from 0 to 1 (Lin, 1991); 0 if either side is empty.

    scipy's `jensenshannon` is its square root.
    """
    n, m = sum(reference.values()), sum(current.values())
    if not n or not m:
        return 0.0
    divergence = 0.0
    for name in _names(reference, current):
        p, q = reference.get(name, 0) / n, current.get(name, 0) / m
        divergence += sum(x * math.log2(2 * x / (p + q)) / 2 for x in (p, q) if x)
    return min(1.0, max(0.0, divergence))


def kolmogorov_smirnov(reference: Histogram, current: Histogram) -> HypothesisTest:
    """Return the largest difference of the cumulative shares at the edges, and its asymptotic p-value.

    Between edges the difference may be larger, so the test rejects less often than its level: 1.7 % for 5 % with ten
    cells. The p-value is 2 Σ (−1)^(k−1) exp(−2 k² x²) with x = √(nm/(n+m)) · D (Kolmogorov, 1933; Smirnov, 1948).

    Raises ValueError: the edges differ.
    """
    check_same_edges(reference, current)
    n, m = reference.total, current.total
    if not n or not m:
        return HypothesisTest(0.0, 1.0)
    pairs = zip(reference.cumulative(), current.cumulative(), strict=True)
    distance = max(abs(mine / n - theirs / m) for mine, theirs in pairs)
    x = math.sqrt(n * m / (n + m)) * distance
    if x < 0.2:  # the series converges slowly, and the p-value is 1 to 12 digits
        return HypothesisTest(distance, 1.0)
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return HypothesisTest(distance, min(1.0, max(0.0, tail)))


def chi_square(reference: Cells, current: Cells) -> HypothesisTest:
    """Return Pearson's test of homogeneity of two rows of counts.

    Rare cells are pooled, from the rarest, until each pool expects 5 on both sides.
    """
    n, m = sum(reference.values()), sum(current.values())
    pools, rest = list[tuple[int, int]](), (0, 0)
    pairs = [(reference.get(name, 0), current.get(name, 0)) for name in _names(reference, current)]
    for pair in sorted(pairs, key=sum):
        rest = (rest[0] + pair[0], rest[1] + pair[1])
        if sum(rest) * min(n, m) >= _MIN_EXPECTED * (n + m):
            pools.append(rest)
            rest = (0, 0)
    if pools:  # what is left is part of the last pool
        pools[-1] = (pools[-1][0] + rest[0], pools[-1][1] + rest[1])
    return _pearson(pools) if len(pools) > 1 else HypothesisTest(0.0, 1.0)


def _pearson(pairs: list[tuple[int, int]]) -> HypothesisTest:
    n, m = (sum(side) for side in zip(*pairs, strict=True))
    statistic = 0.0
    for pair in pairs:
        for count, total in zip(pair, (n, m), strict=True):
            expected = sum(pair) * total / (n + m)
            statistic += (count - expected) ** 2 / expected
    return HypothesisTest(statistic, chi_square_tail(statistic, len(pairs) - 1))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return P(χ² ≥ statistic), by the finite sums of Abramowitz and Stegun, 26.4.4 and 26.4.5."""
    half = statistic / 2
    if half <= 0:
        return 1.0
    if degrees % 2 == 0:  # P(a Poisson variable of mean `half` is below degrees / 2)
        orders, tail = [float(r) for r in range(degrees // 2)], 0.0
    else:
        orders, tail = [r + 0.5 for r in range((degrees - 1) // 2)], math.erfc(math.sqrt(half))
    return min(1.0, tail + sum(math.exp(r * math.log(half) - half - math.lgamma(r + 1)) for r in orders))


def _names(reference: Cells, current: Cells) -> list[str]:
    """The cells that either side has, in the order of the first."""
    names = dict.fromkeys(itertools.chain(reference, current))
    return [name for name in names if reference.get(name) or current.get(name)]


def _smoothed_shares(reference: Cells, current: Cells) -> list[tuple[float, float]]:
    names = _names(reference, current)
    n, m = (sum(side.values()) + len(names) / 2 for side in (reference, current))
    return [((reference.get(name, 0) + 0.5) / n, (current.get(name, 0) + 0.5) / m) for name in names]
