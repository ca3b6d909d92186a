"""Histograms and counts of categories, compared with numpy's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.statistics.distributions import CategoryCounts, Histogram, cell_name

EDGES = (-1.0, 0.0, 0.5, 2.0)
# Many values on edges, where the two conventions differ.
values = st.lists(st.one_of(st.sampled_from(EDGES), st.floats(-3, 3)), max_size=20)


def histogram_of(*recorded):
    histogram = Histogram(EDGES)
    for value in recorded:
        histogram.record(value)
    return histogram


@settings(max_examples=25)
@given(values)
def test_counts_agree_with_numpy(recorded):
    # numpy's cells are closed on the left: those of the negated values are ours, from the last.
    negated = np.histogram(-np.array(recorded), [-np.inf, *(-edge for edge in reversed(EDGES)), np.inf])[0]
    histogram = histogram_of(*recorded)
    assert histogram.counts == list(negated[::-1])
    assert histogram.cumulative()[:-1] == [sum(value <= edge for value in recorded) for edge in EDGES]


@settings(max_examples=25)
@given(values, values)
def test_merged_counts_are_those_of_all_values(first, second):
    merged = histogram_of(*first).merge(histogram_of(*second))
    assert merged.counts == histogram_of(*first, *second).counts
    assert merged.sum == pytest.approx(sum([*first, *second]))


def test_values_that_are_no_numbers_harm_nothing():
    histogram = histogram_of(math.nan, math.inf, -math.inf, 1.0, 3.0)
    assert (histogram.counts, histogram.sum, histogram.num_invalid) == ([0, 0, 0, 1, 1], 4.0, 3)
    assert histogram.cells() == {"2": 1, "+Inf": 1}


@settings(max_examples=25)
@given(st.one_of(st.sampled_from(EDGES), st.floats(-3, 3)))
def test_the_cell_of_a_value_is_the_one_that_counts_it(value):
    assert histogram_of(value).cells() == {cell_name(EDGES, value): 1}


@pytest.mark.parametrize("edges", [(), (1.0, 1.0), (2.0, 1.0), (0.0, math.nan), (math.inf,)])
def test_edges_that_are_none_are_rejected(edges):
    with pytest.raises(ValueError, match="finite"):
        Histogram(edges)


def test_histograms_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="same edges"):
        Histogram(EDGES).merge(Histogram((1.0,)))
    with pytest.raises(ValueError, match="4 edges need 5 counts"):
        Histogram(EDGES, [1, 2])


@settings(max_examples=25)
@given(*[st.lists(st.sampled_from(["other", *"abcdefgh"]), max_size=20)] * 2, st.integers(1, 10))
def test_categories_lose_no_count_and_keep_the_limit(first, second, limit):
    counts = [CategoryCounts(limit) for _ in range(2)]
    for each, recorded in zip(counts, (first, second), strict=True):
        for category in recorded:
            each.record(category)
    merged = counts[0].merge(counts[1])
    assert merged.total == sum(merged.cells().values()) == len(first) + len(second)
    assert len(merged.counts) <= 2 * limit
    for name, count in merged.counts.items():
        assert count <= (first + second).count(name) <= count + merged.missed
    if len({*first, *second}) <= 2 * limit and "other" not in first + second:
        assert merged.counts == {name: [*first, *second].count(name) for name in {*first, *second}}


def test_too_many_categories_count_as_other():
    counts = CategoryCounts(1)
    for category in ("cat", "cat", "x" * 1000, "other"):
        counts.record(category)
    assert counts.cells() == {"cat": 2, "x" * 100: 1, "other": 1}
    assert counts.knows("dog") and counts.is_complete  # "other" is a category's own name here
    counts.record("fish")
    assert (counts.cells(), counts.missed) == ({"cat": 2, "other": 3}, 1)
    assert not counts.knows("dog") and not counts.knows("cat")  # "other" may contain another value of theirs
    counts.record("cat", 18)
    assert counts.knows("cat")
    merged = counts.merge(CategoryCounts(1, {"dog": 1, "fish": 5}))
    assert (merged.cells(), merged.missed) == ({"cat": 20, "other": 9}, 6)
