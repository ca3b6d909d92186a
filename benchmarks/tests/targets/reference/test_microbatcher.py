"""The reference article's batching, sentence by sentence, in virtual time."""

import collections

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from noria_bench.targets.reference.microbatcher import Microbatcher


def make_batcher(*puts, timeout_s=0.5, max_images=8):
    batcher = Microbatcher(timeout_s, max_images)
    for number, (group, now) in enumerate(puts):
        batcher.put(group, f"{group}{number}", 1, now)
    return batcher


def test_a_full_group_runs_at_once_and_later_requests_stay():
    batcher = make_batcher(("b", 0.01), *[("a", 0.02)] * 9)
    assert batcher.fetch(0.03) == [f"a{k}" for k in range(1, 9)]
    assert batcher.fetch(0.04) == []
    assert batcher.fetch(0.5) == ["b0"]
    assert batcher.fetch(1.0) == ["a9"]
    assert batcher.next_tick() is None


def test_the_group_with_the_oldest_request_runs_at_the_tick():
    batcher = make_batcher(("a", 0.1), ("b", 0.2), ("a", 0.3), ("b", 0.4), ("b", 0.4))
    assert batcher.fetch(0.49) == []
    assert batcher.next_tick() == 0.5
    assert batcher.fetch(0.5) == ["a0", "a2"]
    assert batcher.fetch(0.51) == []  # the tick is used up
    assert batcher.next_tick() == 1.0
    assert batcher.fetch(1.0) == ["b1", "b3", "b4"]


def test_a_full_group_runs_before_an_older_request_at_the_tick_too():
    batcher = make_batcher(("a", 0.1), *[("b", 0.2)] * 8)
    assert batcher.fetch(0.5)[0].startswith("b")


def test_of_two_full_groups_the_one_with_the_oldest_request_runs_first():
    batcher = make_batcher(("b", 0.1), *[("a", 0.2)] * 8, *[("b", 0.3)] * 7)
    assert [batcher.fetch(0.4)[0][0], batcher.fetch(0.4)[0][0]] == ["b", "a"]


def test_a_tick_that_passes_while_the_device_is_busy_stays_due():
    batcher = make_batcher(("a", 0.0))
    assert batcher.fetch(0.5) == ["a0"]
    batcher.put("b", "b", 1, 0.6)  # the device is busy until 2.2
    assert batcher.fetch(2.2) == ["b"]
    assert batcher.next_tick() is None
    batcher.put("c", "c", 1, 2.3)
    assert batcher.next_tick() == 2.5


def test_images_are_counted_not_requests():
    batcher = Microbatcher(0.5, 8)
    for number, num_images in enumerate((4, 2, 4, 1)):
        batcher.put("a", number, num_images, 0.1)
    assert batcher.fetch(0.1) == [0, 1]  # the third does not fit, and none overtakes it
    assert batcher.fetch(0.1) == []
    assert batcher.fetch(0.5) == [2, 3]


def test_a_request_larger_than_a_batch_runs_alone():
    batcher = Microbatcher(0.5, 8)
    batcher.put("a", "large", 16, 0.0)
    batcher.put("a", "small", 1, 0.0)
    assert batcher.fetch(0.0) == ["large"]


@pytest.mark.parametrize("timeout_s", [0.1, 0.5])
@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.floats(0, 2)), max_size=30))
def test_each_request_is_fetched_once_in_its_group_s_order_within_the_batch_size(timeout_s, puts):
    batcher = Microbatcher(timeout_s, 8)
    arriving = collections.deque(sorted(puts, key=lambda put: put[2]))
    fetched, now = [], 0.0
    while arriving or batcher.next_tick() is not None:
        tick = batcher.next_tick()
        now = max(now, min(t for t in (tick, arriving[0][2] if arriving else None) if t is not None))
        while arriving and arriving[0][2] <= now:
            put = arriving.popleft()
            batcher.put(put[0], put, put[1], put[2])
        batch = batcher.fetch(now)
        assert batch or tick is None or now < tick
        assert len({put[0] for put in batch}) <= 1
        assert len(batch) == 1 or sum(put[1] for put in batch) <= 8
        fetched += batch
    assert collections.Counter(fetched) == collections.Counter(puts)
    for group in "abc":
        arrivals = [put[2] for put in fetched if put[0] == group]
        assert arrivals == sorted(arrivals)
