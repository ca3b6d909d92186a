"""E-processes: their expectation without a difference, summed over all outcomes, and confidence sequences."""

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.canary.e_processes import bet, log_mean_exp, rate_interval, two_sample_log_factor

shares = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(lambda weights: [w / sum(weights) for w in weights])
sizes = st.integers(1, 4)


def outcomes(n, p):
    """All counts of n outcomes in three cells, with their probabilities."""
    for counts in itertools.product(range(n + 1), repeat=3):
        if sum(counts) == n:
            ways = math.factorial(n) // math.prod(map(math.factorial, counts))
            yield counts, ways * math.prod(q**count for q, count in zip(p, counts, strict=True))


@settings(max_examples=25)
@given(shares, shares, shares, sizes, sizes)
def test_a_windows_factor_has_an_expectation_of_at_most_1_without_a_difference(true, p_canary, p_control, n, m):
    expectation = sum(
        p * q * math.exp(two_sample_log_factor(canary, control, p_canary, p_control))
        for (canary, p), (control, q) in itertools.product(outcomes(n, true), outcomes(m, true))
    )
    assert expectation <= 1 + 1e-9


@settings(max_examples=25)
@given(shares, shares, sizes, sizes)
def test_a_windows_factor_grows_on_average_with_the_difference_that_it_bets_on(p_canary, p_control, n, m):
    growth = sum(
        p * q * two_sample_log_factor(canary, control, p_canary, p_control)
        for (canary, p), (control, q) in itertools.product(outcomes(n, p_canary), outcomes(m, p_control))
    )
    assert growth >= -1e-9


def test_one_arm_alone_is_no_evidence():
    assert two_sample_log_factor((5, 0), (0, 0), (0.9, 0.1), (0.1, 0.9)) == 0.0
    assert two_sample_log_factor((0, 0), (5, 0), (0.9, 0.1), (0.1, 0.9)) == 0.0


@given(st.lists(st.floats(-0.95, 0.95), min_size=1, max_size=6), st.floats(0, 1))
def test_a_fair_bet_keeps_the_expected_wealth(stakes, payoff):
    start = [math.log(2)] * len(stakes)
    won, lost = bet(start, stakes, payoff), bet(start, stakes, -payoff)
    assert [math.exp(a) + math.exp(b) for a, b in zip(won, lost, strict=True)] == pytest.approx([4] * len(stakes))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=7))
def test_the_log_of_the_mean_is_scipys(logs):
    assert log_mean_exp(logs) == pytest.approx(scipy.special.logsumexp(logs) - math.log(len(logs)))


@pytest.mark.parametrize(("successes", "n"), [(0, 80), (1, 1), (5, 1000), (300, 1000), (1000, 1000)])
def test_the_interval_is_where_the_mixtures_likelihood_ratio_is_below_the_limit(successes, n):
    low, high = rate_interval(successes, n, 0.05)
    mixture = scipy.special.betaln(0.5 + successes, 0.5 + n - successes) - scipy.special.betaln(0.5, 0.5)

    def log_ratio(p):
        return mixture - scipy.special.xlogy(successes, p) - scipy.special.xlog1py(n - successes, -p)

    assert (low == 0) == (successes == 0) and (high == 1) == (successes == n)
    assert low <= successes / n <= high
    for border in {low, high} - {0.0, 1.0}:
        assert log_ratio(border) == pytest.approx(math.log(1 / 0.05), abs=1e-4)


def test_no_data_say_nothing_of_a_rate():
    assert rate_interval(0, 0, 0.05) == (0.0, 1.0)


def test_nearly_all_intervals_hold_the_true_rate_at_every_look():
    rng, missed = np.random.default_rng(1), 0
    for _ in range(400):
        totals = np.cumsum(rng.binomial(40, 0.1, 12))
        intervals = [rate_interval(int(total), 40 * (k + 1), 0.05) for k, total in enumerate(totals)]
        missed += not all(low <= 0.1 <= high for low, high in intervals)
    # At a true rate of 5 %, 45 or more of 400 have a probability below 1e-6.
    assert missed < 45
    assert scipy.stats.binom.sf(44, 400, 0.05) < 1e-6
