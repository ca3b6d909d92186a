"""Selection of a batch: the window of lengths around the leader that costs least per real token."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from noria.scheduling.batch.selection import BatchLimits, num_to_fill, num_to_pack, select_window

LIMITS = BatchLimits(max_rows=8, max_tokens=512, overhead_tokens=15.0, batch_s=lambda tokens: 15.0 + tokens)


def select(lengths, leader, **limits):
    start, end = select_window(lengths, leader, replace(LIMITS, **limits))
    return lengths[start:end]


def test_a_batch_takes_no_longer_than_the_leaders_deadline_allows():
    assert select([30] * 8, 0, max_s=15.0 + 90) == [30] * 3
    assert select([30] * 8, 0, max_s=1.0) == [30]


def test_a_leader_waits_for_company_only_if_those_who_wait_gain_more():
    assert select([30] * 8, 0, num_waiting=8) == [30] * 6  # each row saves 15 for two others, and costs 30
    assert select([30] * 8, 0, num_waiting=40) == [30] * 8
    assert select([30, 30], 0, num_waiting=2) == [30]  # nobody else gains
    assert select([30] * 8, 0, num_waiting=8, num_sessions=2) == [30] * 4  # half of what is saved is for each session


def test_texts_without_padding_share_a_batch_until_its_tokens_or_rows_are_full():
    assert num_to_pack([200, 10, 302, 1], LIMITS) == 3
    assert num_to_pack([1] * 20, LIMITS) == 8
    assert num_to_pack([600, 1], LIMITS) == 1
    assert num_to_pack([30, 50, 11], replace(LIMITS, max_s=15.0 + 90)) == 2
    assert num_to_pack([30] * 8, replace(LIMITS, num_waiting=8)) == 6  # as of equal lengths with padding


def test_rows_that_are_left_are_filled_by_the_longest_texts_that_fit():
    assert num_to_fill([40, 40], [3, 38, 39, 40], LIMITS) == 3  # 3 real tokens are not worth 40
    assert num_to_fill([40] * 7, [39, 40], LIMITS) == 1
    assert num_to_fill([40, 40], [], LIMITS) == 0


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10).map(sorted),
    data=st.data(),
    max_rows=st.integers(1, 8),
    max_tokens=st.integers(1, 120),
)
def test_no_window_within_the_limits_costs_less(lengths, data, max_rows, max_tokens):
    leader = data.draw(st.integers(0, len(lengths) - 1))
    limits = replace(LIMITS, max_rows=max_rows, max_tokens=max_tokens)
    start, end = select_window(lengths, leader, limits)
    assert start <= leader < end

    def cost(window):
        return limits.batch_s(len(window) * window[-1]) / sum(window)

    allowed = [
        lengths[first:last]
        for first, last in itertools.product(range(leader + 1), range(leader + 1, len(lengths) + 1))
        if limits.allow(last - first, (last - first) * lengths[last - 1]) or last - first == 1
    ]
    assert lengths[start:end] in allowed
    assert cost(lengths[start:end]) == min(map(cost, allowed))
