"""Images that give their slots to those ahead of them, and go on later."""

import pytest

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.step.evictions import MAX_EVICTIONS
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import (
    BatchKey,
    FinishReason,
    ImageFinished,
    ImageProgress,
    ItemId,
    IterationResult,
    MeasuredTimings,
    ReleasedImage,
    SchedulableRequest,
    SlotAssignment,
)

KEY = BatchKey(64, 64)
LATER, URGENT = ItemId("later", 0), ItemId("urgent", 0)


def known_costs():
    return CostModel(8, steps={KEY: CostCurve({1: 1.0, 8: 8.0})})


def make_request(attempt_id, calls=5, images=1, priority="normal", **more):
    return SchedulableRequest(attempt_id, KEY, images, calls, None, priority=priority, **more)


def run_iteration(scheduler, now=0.0, **result):
    plan = scheduler.plan(now)
    return plan, scheduler.commit(plan, IterationResult(**result), now)


def run_to_the_end(scheduler):
    """Run until nothing is left; return the calls of each image and the requests that finished, in order."""
    calls, finished = {}, []
    while (plan := scheduler.plan(0.0)) is not None:
        for step in plan.steps:
            calls.setdefault(step.image, []).append(step.call)
        finished += [
            event.attempt_id
            for event in scheduler.commit(plan, IterationResult(), 0.0)
            if not isinstance(event, ImageFinished)
        ]
    return calls, finished


@pytest.fixture
def scheduler():
    """Both slots are taken, the second one by the image that steps last, after two calls of each."""
    scheduler = StepScheduler(2, costs=known_costs())
    scheduler.submit(make_request("first"), 0.0)
    scheduler.submit(make_request("later", priority="low"), 1.0)
    for _ in range(2):
        run_iteration(scheduler, 1.0)
    return scheduler


def evict(scheduler, **result):
    scheduler.submit(make_request("urgent", calls=2, priority="high"), 2.0)
    return run_iteration(scheduler, 2.0, **result)[0]


def test_an_urgent_image_steps_next_in_the_slot_of_the_one_that_would_step_last(scheduler):
    plan = evict(scheduler)
    assert plan.evictions == (ReleasedImage(LATER, 1, ImageProgress(2, 4)),)
    assert (plan.joins, plan.returns) == ((SlotAssignment(URGENT, 1),), ())
    assert [step.image.attempt_id for step in plan.steps] == ["first", "urgent"]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_evicted) == (2, 1, 1)


def test_an_evicted_image_goes_on_at_its_call_in_any_free_slot(scheduler):
    evict(scheduler)
    _, events = run_iteration(scheduler, 3.0)
    assert [event.attempt_id for event in events[1:]] == ["urgent"]
    plan, _ = run_iteration(scheduler, 4.0)
    assert plan.joins == plan.returns == (SlotAssignment(LATER, 1),)
    calls, finished = run_to_the_end(scheduler)
    assert (calls[LATER], finished) == ([3, 4], ["later"])
    assert scheduler.num_evicted == 0


def test_its_times_count_from_its_first_slot(scheduler):
    evict(scheduler)
    now, ended = 3.0, {}
    while (plan := scheduler.plan(now)) is not None:
        timings = MeasuredTimings({"joins": now})
        events = scheduler.commit(plan, IterationResult(phase_timings=timings), now)
        ended |= {event.attempt_id: event for event in events if not isinstance(event, ImageFinished)}
        now += 1.0
    timings = ended["later"].timings
    assert (timings.queue_s, timings.slot_s, timings.num_calls) == (0.0, 5.0, 5)
    assert timings.text_encode_s == 0.0  # in the iteration in which it joined first


def test_no_image_is_evicted_for_one_that_would_not_step_earlier(scheduler):
    scheduler.submit(make_request("as late", priority="low"), 1.0)
    scheduler.submit(make_request("last", priority="low"), 5.0)
    plan, _ = run_iteration(scheduler, 5.0)
    assert (plan.evictions, plan.joins) == ((), ())


def test_every_image_is_evicted_at_most_once_for_each_that_arrives(scheduler):
    """So images do not take each other's slots in turn."""
    evict(scheduler)
    scheduler.submit(make_request("more urgent", calls=9, priority="high"), 1.5)
    plans = []
    while (plan := scheduler.plan(2.0)) is not None:
        plans.append(plan)
        scheduler.commit(plan, IterationResult(), 2.0)
    assert [each.image.attempt_id for plan in plans for each in plan.evictions] == ["first"]


@pytest.mark.parametrize("change", ["exclusive runs", "exclusive waits", "denoised", "memory"])
def test_a_slot_is_not_taken(change):
    scheduler = StepScheduler(2, decode_batch=1, costs=known_costs())
    if change == "exclusive runs":
        scheduler.submit(make_request("a", images=2, exclusive=True, priority="low"), 0.0)
    else:
        scheduler.submit(make_request("a", images=2, calls=1 if change == "denoised" else 5, priority="low"), 0.0)
    if change == "denoised":  # one image is decoded, then the other one
        scheduler.submit(make_request("b", calls=1, images=2, priority="low"), 0.0)
    if change == "memory":
        run_iteration(scheduler, oom_phase="joins")
    run_iteration(scheduler)
    scheduler.submit(make_request("urgent", exclusive=change == "exclusive waits", priority="high"), 0.0)
    assert scheduler.plan(0.0).evictions == ()


def test_an_iteration_evicts_a_bounded_number_of_images():
    scheduler = StepScheduler(2 * MAX_EVICTIONS, costs=known_costs())
    scheduler.submit(make_request("later", images=2 * MAX_EVICTIONS, priority="low"), 0.0)
    run_iteration(scheduler)
    scheduler.submit(make_request("urgent", images=2 * MAX_EVICTIONS, priority="high"), 0.0)
    evicted = [[each.image.index for each in run_iteration(scheduler)[0].evictions] for _ in range(3)]
    assert evicted == [[*range(15, 7, -1)], [*range(7, -1, -1)], []]


def test_no_more_images_are_evicted_than_there_are_slots():
    scheduler = StepScheduler(2, costs=known_costs())
    for priority in ("low", "normal", "high"):
        scheduler.submit(make_request(priority, images=2, priority=priority), 0.0)
        run_iteration(scheduler)
    assert (scheduler.num_evicted, [each.image.attempt_id for each in scheduler.plan(0.0).steps]) == (2, ["normal"] * 2)


def test_a_deadline_that_needs_one_more_eviction_is_rejected():
    """Two images wait that were evicted, so that none of the running ones can be."""
    scheduler = StepScheduler(2, costs=known_costs())
    for priority in ("low", "normal"):
        scheduler.submit(make_request(priority, images=2, priority=priority), 0.0)
        run_iteration(scheduler)
    urgent = make_request("urgent", calls=1, priority="high", deadline=4.0)
    (rejected,) = scheduler.submit(urgent, 0.0)
    assert (rejected.attempt_id, rejected.finish_reason) == ("urgent", FinishReason.UNMEETABLE)
    # Both images of `normal` have four calls left, of two rows: 8 s; then it takes 1 s beside one of `low`.
    assert "it would finish in 10.00 s, its deadline is in 4.00 s" in rejected.message


def test_states_that_do_not_fit_the_hosts_memory_change_nothing(scheduler):
    before = scheduler.snapshot(2.0, 9)
    plan = evict(scheduler, oom_phase="evictions")
    assert len(plan.evictions) == 1
    assert [each.image for each in scheduler.snapshot(2.0, 9).running] == [each.image for each in before.running]
    assert (scheduler.num_waiting, scheduler.num_evicted) == (1, 0)
    plan, _ = run_iteration(scheduler, 2.0)  # and it is not tried again until an image has left
    assert (plan.evictions, [step.call for step in plan.steps]) == ((), [2, 2])
    calls, finished = run_to_the_end(scheduler)
    assert (calls[LATER], sorted(finished)) == ([3, 4], ["first", "later", "urgent"])


def test_an_image_whose_return_does_not_fit_waits_where_it_was(scheduler):
    evict(scheduler)
    run_iteration(scheduler, 3.0)
    plan, _ = run_iteration(scheduler, 4.0, oom_phase="joins")
    assert plan.returns == (SlotAssignment(LATER, 1),)
    assert (scheduler.num_running, scheduler.num_evicted) == (1, 1)
    calls, finished = run_to_the_end(scheduler)
    assert (calls[LATER], finished) == ([2, 3, 4], ["first", "later"])


def test_an_evicted_image_that_does_not_fit_alone_fails():
    scheduler = StepScheduler(1)
    scheduler.submit(make_request("later", priority="low"), 0.0)
    run_iteration(scheduler)
    scheduler.submit(make_request("urgent", calls=1, priority="high"), 0.0)
    run_iteration(scheduler)
    _, (ended,) = run_iteration(scheduler, oom_phase="joins")
    assert (ended.attempt_id, ended.finish_reason, ended.num_departures) == ("later", FinishReason.FAILED, 1)


def test_an_image_that_could_not_be_saved_fails(scheduler):
    scheduler.submit(make_request("urgent", calls=2, priority="high"), 2.0)
    plan = scheduler.plan(2.0)
    (ended,) = scheduler.commit(plan, IterationResult({LATER: "the device is lost"}), 2.0)
    assert (ended.attempt_id, ended.finish_reason, ended.message) == (
        "later",
        FinishReason.FAILED,
        "the device is lost",
    )


def test_an_evicted_image_can_be_cancelled_and_counts_as_one_that_has_left(scheduler):
    evict(scheduler)
    (ended,) = scheduler.cancel("later", 3.0)
    assert (ended.num_departures, ended.timings.num_calls) == (1, 2)
    assert (scheduler.num_waiting, scheduler.num_evicted, scheduler.backlog_s) == (0, 0, 2.0 + 1.0)


def test_a_cancelled_eviction_that_does_not_fit_leaves_nothing(scheduler):
    scheduler.submit(make_request("urgent", calls=2, priority="high"), 2.0)
    plan = scheduler.plan(2.0)
    scheduler.cancel("later", 2.0)
    scheduler.commit(plan, IterationResult(oom_phase="evictions"), 2.0)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_evicted) == (1, 1, 0)
    assert run_to_the_end(scheduler)[1] == ["urgent", "first"]


def test_an_evicted_image_is_released_to_another_engine_with_its_progress(scheduler):
    evict(scheduler)
    released = scheduler.release("later", 3.0)
    assert released.images == (ReleasedImage(LATER, None, ImageProgress(2, 4)),)
    assert scheduler.num_evicted == scheduler.num_waiting == 0


def test_progress_and_backlog_count_the_calls_that_an_evicted_image_has_left(scheduler):
    evict(scheduler)
    assert scheduler.backlog_s == 2 + 1 + 3
    progress = scheduler.progress(["later"], 3.0)["later"]
    assert (progress.queue_position, progress.call) == (0, 2)
    assert (progress.start_in_s, progress.finish_in_s) == (2.0, 6.0)


def test_a_forecast_knows_that_waiting_images_take_slots():
    scheduler = StepScheduler(1, costs=known_costs())
    scheduler.submit(make_request("later", calls=5, priority="low"), 0.0)
    run_iteration(scheduler)
    scheduler.submit(make_request("urgent", calls=2, priority="high"), 0.0)
    forecasts = scheduler.progress(["later", "urgent"], 0.0)
    assert [(each.start_in_s, each.finish_in_s) for each in forecasts.values()] == [(2.0, 6.0), (0.0, 2.0)]


def test_a_deadline_is_accepted_that_only_a_slot_of_another_image_can_meet():
    scheduler = StepScheduler(1, costs=known_costs())
    scheduler.submit(make_request("long", calls=100), 0.0)
    run_iteration(scheduler)
    assert scheduler.submit(make_request("urgent", calls=2, deadline=3.0), 0.0) == []
    plan, _ = run_iteration(scheduler)
    assert [step.image for step in plan.steps] == [URGENT]
