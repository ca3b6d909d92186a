"""Limits of a queue: the client that fills it is refused, and one that has little in it is not."""

import itertools
from collections import Counter

import pytest

from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.shares.queue_limits import Queued
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, BatchResult, IterationResult, SchedulableRequest

KEY = BatchKey(64, 64)


@pytest.mark.parametrize(
    ("total", "own", "added", "share", "excess"),
    [
        (8, 8, 2, 0.5, 0),  # there is room
        (10, 0, 5, 0.5, 0),  # it is full of others' work
        (10, 1, 5, 0.5, 5),
        (10, 10, 1, 0.5, 1),
        (10, 0, 3, 0.25, 3),  # a lower weight
        (10, 4, 1, 1.0, 1),  # clients do not count, or the work of those that have ended is still there
    ],
)
def test_a_full_queue_accepts_what_the_share_of_its_client_has_room_for(total, own, added, share, excess):
    assert Queued(total, own, added, 10, share).excess == excess


def images(policy, **limits):
    """Make a scheduler that serves an image of ten calls in ten seconds."""
    costs = CostModel(1, {KEY: CostCurve({1: 1.0})})
    return StepScheduler(1, costs=costs, policy=POLICIES[policy], **limits)


def texts(policy, **limits):
    """Make a scheduler that serves a text of ten tokens in about ten seconds."""
    costs = CostModel(10, {KEY: CostCurve({1: 1.0, 10: 10.0})})
    return BatchScheduler(1, 1, 10, costs=costs, policy=POLICIES[policy], **limits)


def make_request(number, client, **more):
    """Make a request of ten calls for images, of ten tokens for texts."""
    return SchedulableRequest(f"r{number}", KEY, 1, 10, None, num_tokens=(10,), client=client, **more)


@pytest.mark.parametrize("make", [images, texts])
@pytest.mark.parametrize("limits", [{"queue_limit": 24}, {"queue_limit_s": 300.0}])
@pytest.mark.parametrize("policy", ["fair", "least-slack"])
def test_a_client_is_refused_for_its_own_heap_and_not_for_that_of_another(make, limits, policy):
    scheduler, numbers = make(policy, **limits), itertools.count()

    def send(client, weight=1.0):
        """Send a request; return why it is refused, or an empty string."""
        refused = scheduler.submit(make_request(next(numbers), client, weight=weight), 0.0)
        return refused[0].message if refused else ""

    heap = [send("heap") for _ in range(40)]
    assert heap[0] == "" and "the queue is full" in heap[-1] and "share" not in heap[-1]
    small = [send("other") for _ in range(40)]
    if policy == "least-slack":
        assert small[0] == heap[-1]
        return
    assert 0.4 * heap.count("") <= small.count("") <= 0.5 * heap.count("")
    assert small[0] == "" and all("share of the limit" in send(client) for client in ("heap", "other"))
    assert "share of the limit" in send("light", weight=0.01)  # less than one item


@pytest.mark.parametrize(("make", "result"), [(images, IterationResult()), (texts, BatchResult())])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_work_counts_however_long_it_waits_behind_a_higher_priority(make, result, weight):
    """The clock passes the turns of the low client's work, and still it waits."""
    scheduler, numbers, peak_s, accepted = make("fair", queue_limit_s=100.0), itertools.count(), 0.0, Counter()
    for now in range(600):
        for client, more in (("normal", {}), ("low", {"weight": weight, "priority": "low"})):
            accepted[client] += not scheduler.submit(make_request(next(numbers), client, **more), now)
        peak_s = max(peak_s, scheduler.backlog_s)
        if (plan := scheduler.plan(now)) is not None:
            scheduler.commit(plan, result, now + 1.0)
    share = weight / (1.0 + weight)
    assert accepted["low"] and accepted["normal"] > 50
    assert 100.0 < peak_s <= 100.0 * (1.0 + share) + 10.0
