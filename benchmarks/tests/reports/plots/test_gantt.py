"""Bars do not overlap, and the batch size follows from them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_runs import CLOSED, record, run

from noria_bench.reports.plots.gantt import bars_of, images_in_generation, window_of

TIMES = st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 10), st.booleans()), max_size=40)


@settings(deadline=None)  # the machine may be busy
@given(TIMES)
def test_no_two_bars_of_a_lane_overlap_and_none_is_missing(times):
    records = [record(k, length, start_s=at, answered=answered) for k, (at, length, answered) in enumerate(times)]
    bars = bars_of(records, 5.0, 15.0)
    touching = [r for r in records if r.sent_s < 15.0 and (r.done_s is None or r.done_s > 5.0)]
    assert len(bars) == len(touching)
    for lane in {bar.lane for bar in bars}:
        own = sorted((bar.start_s, bar.end_s) for bar in bars if bar.lane == lane)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(own))
    assert {bar.lane for bar in bars} == set(range(len({bar.lane for bar in bars})))


def test_queue_time_is_distinguished_from_generation():
    (bar,) = bars_of([record(0, 2.0, start_s=1.0, queue_s=0.5)], 0.0, 10.0)
    assert (bar.start_s, bar.generation_start_s, bar.end_s, bar.queue_time_known, bar.failed) == (
        1.0,
        1.5,
        3.0,
        True,
        False,
    )
    (unreported,) = bars_of([record(0, 2.0, start_s=1.0, queue_s=0.0)], 0.0, 10.0, reports_queue_time=False)
    assert not unreported.queue_time_known
    (missing,) = bars_of([record(0, 2.0, start_s=1.0, queue_s=None)], 0.0, 10.0)
    assert (missing.generation_start_s, missing.queue_time_known) == (1.0, False)


def test_an_unanswered_request_lasts_to_the_end_of_the_window_without_generation():
    bars = bars_of([record(0, start_s=1.0, answered=False)], 0.0, 10.0)
    assert (bars[0].end_s, bars[0].failed) == (10.0, True)
    assert images_in_generation(bars, 0.0, 10.0) == ([0.0, 10.0], [0, 0])


def test_the_batch_counts_the_images_in_generation_at_each_moment():
    records = [record(0, 4.0, start_s=0.0, queue_s=1.0, num_images=2), record(1, 4.0, start_s=1.0, queue_s=1.0)]
    moments, counts = images_in_generation(bars_of(records, 0.0, 6.0), 0.0, 6.0)
    assert dict(zip(moments, counts, strict=True)) == {0.0: 0, 1.0: 2, 2.0: 3, 4.0: 1, 5.0: 0, 6.0: 0}


def test_the_window_is_the_middle_of_the_run_or_all_of_a_short_one():
    assert window_of(run(traffic=CLOSED)) == (0.0, CLOSED.seconds)
    assert window_of(run(traffic=CLOSED), 4.0) == (3.0, 7.0)
    interrupted = run(records=[record(0, 2.0, start_s=0.0)], traffic=CLOSED, complete=False)
    assert window_of(interrupted, 1.0) == (0.5, 1.5)
