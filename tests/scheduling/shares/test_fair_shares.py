"""Turns: the virtual clock, what is given back and forgotten, and whose image goes ahead of whose."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.shares.fair_shares import FairShares
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason, IterationResult, RequestFinished, SchedulableRequest

KEY = BatchKey(64, 64)


def make_request(name="r", client="", images=1, calls=10, **more):
    return SchedulableRequest(name, KEY, images, calls, None, client=client, **more)


def enter(shares, client, works, **more):
    request = make_request(client=client, images=len(works), **more)
    return request, shares.enter(request, dict(enumerate(works)), 0.0)


def finishes(turns):
    return [turn.virtual_finish for turn in turns.values()]


def test_each_image_comes_after_the_one_before_by_its_work_over_the_weight():
    shares = FairShares()
    assert finishes(enter(shares, "a", [2.0, 2.0])[1]) == [2.0, 4.0]
    assert finishes(enter(shares, "a", [1.0], weight=0.5)[1]) == [6.0]
    assert finishes(enter(shares, "b", [3.0])[1]) == [3.0]


def test_the_clock_runs_by_work_over_weights_and_a_client_that_was_idle_starts_at_it():
    shares = FairShares()
    enter(shares, "a", [9.0], weight=2.0)
    enter(shares, "b", [9.0])
    shares.advance(6.0)
    assert finishes(enter(shares, "c", [1.0])[1]) == [3.0]


def test_unused_work_is_given_back_and_used_work_is_not():
    shares = FairShares()
    first, rejected = enter(shares, "a", [2.0]), enter(shares, "a", [5.0, 5.0])
    shares.leave(*rejected, unused=True)
    assert finishes(enter(shares, "a", [1.0])[1]) == [3.0]
    shares.leave(*first)
    assert finishes(enter(shares, "a", [1.0])[1]) == [4.0]


def test_clients_without_work_are_forgotten():
    shares = FairShares()
    heap = enter(shares, "heap", [100.0])
    for number in range(10):
        shares.leave(*enter(shares, f"c{number}", [0.01]))
    assert list(shares._clients) == ["heap"]
    assert finishes(enter(shares, "c0", [0.5])[1]) == [0.5]
    shares.leave(*heap)
    assert list(shares._clients) == ["c0"]


def test_an_image_has_no_later_deadline_than_those_behind_it_of_its_priority_or_a_lower_one():
    shares = FairShares()
    enter(shares, "low", [5.0, 5.0], priority="low")
    enter(shares, "heap", [5.0, 5.0])
    later = make_request(client="other", images=3)
    assert [turn.deadline for turn in shares.enter(later, {0: 1.0, 1: 6.0, 2: 6.0}, 100.0).values()] == [
        60.0,
        60.0,
        160.0,
    ]
    low = make_request(client="third", priority="low")
    assert [turn.deadline for turn in shares.enter(low, {0: 1.0}, 100.0).values()] == [600.0]
    with_deadline = make_request(client="fourth", deadline=500.0)
    assert [turn.deadline for turn in shares.enter(with_deadline, {0: 11.0}, 100.0).values()] == [160.0]
    assert [turn.deadline for turn in shares.enter(with_deadline, {0: 99.0}, 100.0).values()] == [math.inf]


def make_scheduler(policy="fair", num_slots=64, knee=8, **more):
    costs = CostModel(knee, {KEY: CostCurve({rows: 0.010 + 0.010 * rows for rows in range(1, knee + 1)})})
    return StepScheduler(num_slots, queue_limit=10_000, policy=POLICIES[policy], costs=costs, **more)


def order(scheduler):
    return [each.image for each in scheduler._predictor.queue(0.0)]


def test_an_image_of_another_client_goes_ahead_of_those_whose_turn_is_later():
    scheduler = make_scheduler()
    scheduler.submit(make_request("heap", "a", images=3, calls=100), 0.0)
    scheduler.submit(make_request("short", "b", calls=10), 50.0)
    scheduler.submit(make_request("long", "c", calls=150), 50.0)
    assert order(scheduler) == [("short", 0), ("heap", 0), ("heap", 1), ("long", 0), ("heap", 2)]


@pytest.mark.parametrize("more", [{"arrived_at": 0.0}, {"waited_s": 50.0}])
def test_a_heap_that_arrived_earlier_and_enters_later_goes_by_its_turn(more):
    """It takes longer to prepare than a small request, or has moved here from another engine."""
    arrived_at = more.pop("arrived_at", 1.0)
    scheduler = make_scheduler()
    scheduler.submit(make_request("first", "b", calls=20), 0.5)
    scheduler.submit(make_request("heap", "a", images=2, calls=100, **more), 1.0, arrived_at)
    scheduler.submit(make_request("heap2", "a", images=1, calls=100, **more), 1.0, arrived_at)
    scheduler.submit(make_request("last", "c", calls=20), 2.0)
    assert order(scheduler) == [("first", 0), ("last", 0), ("heap", 0), ("heap", 1), ("heap2", 0)]


@pytest.mark.parametrize("policy", ["least-slack", "fcfs"])
def test_other_policies_do_not_know_clients(policy):
    scheduler = make_scheduler(policy)
    scheduler.submit(make_request("heap", "a", images=2, calls=100), 0.0)
    scheduler.submit(make_request("short", "b", calls=10), 1.0)
    assert order(scheduler) == [("heap", 0), ("heap", 1), ("short", 0)]


def test_a_deadline_keeps_its_place_and_is_not_behind_an_old_heap_of_another_client():
    scheduler = make_scheduler()
    scheduler.submit(make_request("heap", "a", images=3, calls=1000), 0.0)
    scheduler.submit(make_request("soon", "a", deadline=30.0), 1.0)
    scheduler.submit(make_request("other", "b", deadline=90.0), 2.0)
    assert order(scheduler) == [("soon", 0), ("other", 0), ("heap", 0), ("heap", 1), ("heap", 2)]


def run(scheduler, requests, until=None, plans=None):
    """Run `requests`, pairs of an arrival and a request, until all have ended, or `until`; return when each has.

    The plans are appended to `plans`.
    """
    now, ended, upcoming = 0.0, {}, sorted(requests, key=lambda each: each[0])
    while until not in ended and (upcoming or scheduler.num_running or scheduler.num_waiting):
        while upcoming and upcoming[0][0] <= now:
            scheduler.submit(upcoming.pop(0)[1], now)
        plan = scheduler.plan(now)
        if plan is None:
            now = upcoming[0][0]
            continue
        if plans is not None:
            plans.append(plan)
        now += scheduler.costs.step_s(KEY, len(plan.steps)) if plan.steps else 0.0
        for event in scheduler.commit(plan, IterationResult(is_timed=False), now):
            if isinstance(event, RequestFinished):
                assert event.finish_reason is FinishReason.FINISHED
                ended[event.attempt_id] = now
    return ended


@pytest.mark.parametrize("num_slots", [2, 4, 16])
def test_nobody_waits_for_the_slots_of_another_clients_images(num_slots):
    """And each request evicts one image at most, so slots do not go back and forth."""
    scheduler = make_scheduler(num_slots=num_slots, knee=4)
    small = {f"small{number}": 0.5 + 2.0 * number for number in range(12)}
    requests = [(at, make_request(name, "b", calls=20)) for name, at in small.items()]
    plans = []
    ended = run(scheduler, [(0.0, make_request("heap", "a", images=16, calls=200)), *requests], plans=plans)
    alone_s = 20 * 0.020
    assert max(ended[name] - at for name, at in small.items()) <= 2 * alone_s + 2 * 0.050
    assert sum(len(plan.evictions) for plan in plans) <= len(small)


def test_what_evicted_images_have_used_is_not_given_back():
    scheduler = make_scheduler(num_slots=2)
    scheduler.submit(make_request("stays", "a", calls=10), 0.0)
    scheduler.submit(make_request("heap", "a", images=2, calls=100), 0.0)
    scheduler.commit(scheduler.plan(0.0), IterationResult(), 0.0)
    scheduler.submit(make_request("short", "b", calls=10), 0.0)
    assert [each.image for each in scheduler.plan(0.0).evictions] == [("heap", 0)]
    evicted, _ = scheduler._table.requests["heap"].turns.values()
    scheduler.cancel("heap", 0.0)
    scheduler.submit(make_request("next", "a"), 0.0)
    assert scheduler._table.requests["next"].turn(0).virtual_start == evicted.virtual_finish


@pytest.mark.parametrize("num_requests", [1, 8, 64])
@pytest.mark.parametrize("knee", [1, 4, 8])
def test_nobody_is_slowed_down_by_more_than_the_number_of_clients_however_much_another_sends(num_requests, knee):
    """Two clients: one has any number of images, the other one image of ten steps, alone 0.2 s.

    It takes at most twice that, and, as its share of a call is rounded, one step more.
    """
    scheduler = make_scheduler(knee=knee, num_slots=2000)
    heap = [(0.0, make_request(f"h{number}", "heap", images=16, calls=200)) for number in range(num_requests)]
    ended = run(scheduler, [*heap, (0.5, make_request("one", "other"))], until="one")
    assert ended["one"] - 0.5 <= 2 * 0.2 + 0.020 + 0.010 * knee


def alone_s(request, knee):
    together = min(request.num_images, knee)
    return request.num_calls * (0.010 + 0.010 * together) * request.num_images / together


@settings(max_examples=20, deadline=None)
@given(
    loads=st.lists(
        st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 6), st.integers(1, 30)), min_size=1, max_size=8),
        min_size=1,
        max_size=4,
    ),
    arrived_at=st.floats(0.0, 2.0),
    images=st.integers(1, 4),
    calls=st.integers(1, 30),
    knee=st.sampled_from([1, 2, 4, 8]),
)
def test_a_request_takes_no_longer_than_its_share_and_an_image_of_each_other_client(
    loads, arrived_at, images, calls, knee
):
    """Every other client sends any requests at any times, and all of them end.

    A request of a client without other work takes at most its time alone for each client, and, since a client may be
    behind by an image, one of each other client. A client's rows are rounded to whole images, so that it may have two
    thirds of its share, in a call that is a tenth longer.
    """
    scheduler = make_scheduler(knee=knee, num_slots=1000)
    others = [
        (at, make_request(f"{client}.{number}", f"c{client}", num_images, num_calls))
        for client, load in enumerate(loads)
        for number, (at, num_images, num_calls) in enumerate(load)
    ]
    request = make_request("tagged", "tagged", images, calls)
    ended = run(scheduler, [*others, (arrived_at, request)])
    assert len(ended) == len(others) + 1
    longest_s = [max(num_calls for _, _, num_calls in load) * (0.010 + 0.010 * knee) for load in loads]
    share_s = 1.5 * 1.1 * (len(loads) + 1) * alone_s(request, knee)
    assert ended["tagged"] - arrived_at <= share_s + sum(longest_s) + 0.010 + 0.010 * knee


def test_a_client_that_gives_up_its_oldest_images_keeps_its_share():
    shares, served, waiting, now, numbers = FairShares(), Counter(), [], 0.0, itertools.count()

    def arrive(client):
        request = make_request(str(next(numbers)), client)
        turns = shares.enter(request, {0: 1.0}, now)
        waiting.append((turns[0].deadline, turns[0].virtual_finish, next(numbers), request, turns, now))

    for _ in range(5):
        arrive("closed loop")
    for second in range(200):  # the device does an image a second, and the impatient client offers as many
        now = float(second)
        arrive("impatient")
        for late in [each for each in waiting if each[3].client == "impatient" and now - each[5] > 10]:
            waiting.remove(late)
            shares.leave(late[3], late[4], unused=True)
        *_, request, turns, _ = first = min(waiting, key=lambda each: each[:3])
        waiting.remove(first)
        shares.advance(1.0)
        shares.leave(request, turns)
        served[request.client] += 1
        if request.client == "closed loop":
            arrive("closed loop")
    assert min(served.values()) > 0.4 * 200
