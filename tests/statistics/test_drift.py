"""Drift measures, compared with scipy's and with the means that they have without drift."""

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.statistics.distributions import CategoryCounts, Histogram
from noria.statistics.drift import (
    MIN_SAMPLES,
    chi_square,
    chi_square_tail,
    compare_categories,
    compare_histograms,
    corrected_psi,
    jensen_shannon,
    kolmogorov_smirnov,
    psi,
)

counts = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=2, max_size=12).filter(
    lambda pairs: all(map(sum, zip(*pairs, strict=True)))
)


def as_cells(pairs):
    return tuple({str(k): count for k, count in enumerate(side)} for side in zip(*pairs, strict=True))


@settings(max_examples=25)
@given(counts)
def test_psi_is_both_relative_entropies(pairs):
    p, q = (np.array(side) + 0.5 for side in zip(*(pair for pair in pairs if sum(pair)), strict=True))
    p, q = p / p.sum(), q / q.sum()
    assert psi(*as_cells(pairs)) == pytest.approx(scipy.stats.entropy(p, q) + scipy.stats.entropy(q, p), abs=1e-9)


@settings(max_examples=25)
@given(counts)
def test_jensen_shannon_is_scipys(pairs):
    p, q = zip(*pairs, strict=True)
    expected = scipy.spatial.distance.jensenshannon(p, q, base=2) ** 2
    assert jensen_shannon(*as_cells(pairs)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25)
@given(*[st.lists(st.integers(0, 4), min_size=2, max_size=20)] * 2)
def test_kolmogorov_smirnov_is_scipys(first, second):
    histograms = [Histogram((0.0, 1.0, 2.0, 3.0)) for _ in range(2)]
    for histogram, recorded in zip(histograms, (first, second), strict=True):
        for value in recorded:
            histogram.record(value)
    test, n, m = kolmogorov_smirnov(*histograms), len(first), len(second)
    assert test.statistic == pytest.approx(scipy.stats.ks_2samp(first, second, method="asymp").statistic)
    assert test.p_value == pytest.approx(scipy.special.kolmogorov((n * m / (n + m)) ** 0.5 * test.statistic), abs=1e-9)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(30, 300), st.integers(30, 300)), min_size=2, max_size=12))
def test_chi_square_of_frequent_cells_is_scipys(pairs):
    expected = scipy.stats.chi2_contingency(np.array(pairs).T, correction=False)
    assert chi_square(*as_cells(pairs)) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-9)


@settings(max_examples=25)
@given(st.floats(0, 3000), st.integers(1, 200))
def test_the_chi_square_tail_is_scipys(statistic, degrees):
    expected = scipy.stats.chi2.sf(statistic, degrees)
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-12)


def test_rare_cells_are_pooled_until_they_expect_five():
    reference = {"a": 500, "b": 400} | {f"rare {k}": 1 for k in range(12)}
    current = {"a": 50, "b": 40, "rare 0": 1, "rare 20": 1}
    # 14 counts of 1,004 expect 1.3 of 92: they are one cell with the smallest frequent one.
    pooled = [[412, 500], [42, 50]]
    expected = scipy.stats.chi2_contingency(pooled, correction=False)
    assert chi_square(reference, current) == pytest.approx((expected.statistic, expected.pvalue))
    assert chi_square({"a": 3}, {"b": 1}) == chi_square({}, {"b": 1}) == (0.0, 1.0)


def test_the_corrected_psi_is_about_zero_without_drift_and_sees_a_shift():
    rng, n, m = np.random.default_rng(1), 500, 5000
    edges = tuple(scipy.stats.norm.ppf(np.arange(1, 10) / 10))
    raw, corrected, shifted = [], [], []
    for _ in range(100):
        reference, same, other = (
            dict(enumerate(np.bincount(np.searchsorted(edges, rng.normal(mean, 1, size)), minlength=10).tolist()))
            for mean, size in ((0, m), (0, n), (0.5, n))
        )
        raw.append(psi(reference, same))
        corrected.append(corrected_psi(reference, same))
        shifted.append(corrected_psi(reference, other))
    # Six deviations of a mean of 100 chi-square variables with 9 degrees of freedom, times 1/n + 1/m, are 0.0056.
    assert np.mean(raw) == pytest.approx(9 * (1 / n + 1 / m), abs=0.0056)
    assert np.mean(corrected) == pytest.approx(0, abs=0.0056)
    assert max(corrected) < 0.1 < min(shifted)


def test_few_samples_are_not_compared_but_unseen_categories_are_reported():
    reference, current = CategoryCounts(counts={"en": 900, "de": 100}), CategoryCounts(counts={"en": 150, "fr": 49})
    drift = compare_categories(reference, current)
    assert (drift.num_current, drift.psi, drift.js, drift.p_value) == (MIN_SAMPLES - 1, None, None, None)
    assert drift.unseen == {"fr": 49}
    current.record("en")
    drift = compare_categories(reference, current)
    assert drift.psi > 0.1 and drift.p_value < 0.001 and 0 < drift.js < 1


def test_histograms_with_few_samples_are_not_compared():
    reference, few, many = (Histogram((0.0,), counts) for counts in ([500, 500], [199, 0], [200, 0]))
    assert compare_histograms(reference, few).psi is None
    drift = compare_histograms(reference, many)
    assert (drift.ks, drift.num_reference, drift.num_current) == (0.5, 1000, 200)
    assert drift.psi > 0.1 and drift.p_value < 1e-6
    with pytest.raises(ValueError, match="same edges"):
        compare_histograms(reference, Histogram((1.0,)))


def test_nothing_is_no_drift():
    assert corrected_psi({}, {"a": 5}) == jensen_shannon({"a": 5}, {"a": 0}) == 0.0
    assert kolmogorov_smirnov(Histogram((0.0,)), Histogram((0.0,), [1, 0])) == (0.0, 1.0)


def drawn(rng, num, weights):
    """Counts as a front end makes them: value by value."""
    counts = CategoryCounts()
    for k in rng.choice(len(weights), num, p=weights / weights.sum()):
        counts.record(f"t{k}")
    return counts


EQUAL = {num: np.ones(num) for num in (65, 100, 500, 3000)}
ZIPF = {num: 1 / np.arange(1, num + 1) for num in (100, 3000)}


@pytest.mark.parametrize("weights", [*EQUAL.values(), *ZIPF.values()], ids=[*map(str, EQUAL), "zipf 100", "zipf 3000"])
@pytest.mark.parametrize("num", [MIN_SAMPLES, 1000, 10_000])
def test_many_categories_of_one_distribution_have_no_drift(weights, num):
    rng = np.random.default_rng(7)
    for num_reference in (1000, 10_000):
        reference = drawn(rng, num_reference, weights)
        current = drawn(rng, num // 2, weights).merge(drawn(rng, num // 2, weights))  # counts of two front ends
        assert abs(compare_categories(reference, current).psi) < 0.1


@pytest.mark.parametrize("num", [100, 3000])
def test_drift_of_frequent_categories_is_found_among_many(num):
    rng = np.random.default_rng(7)
    drifted = ZIPF[num].copy()
    drifted[:2] = drifted[1], 5 * drifted[0]
    assert compare_categories(drawn(rng, 10_000, ZIPF[num]), drawn(rng, 10_000, drifted)).psi > 0.1


def test_a_reference_that_cut_its_categories_reports_no_unseen_ones():
    reference = CategoryCounts(counts={f"t{k}": 100 for k in range(64)}, other=3600, missed=100)
    drift = compare_categories(reference, CategoryCounts(counts={f"t{k}": 10 for k in range(100)}))
    assert (abs(drift.psi) < 0.1, drift.unseen) == (True, {})
