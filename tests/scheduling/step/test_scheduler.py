"""The step scheduler, by example and as a Hypothesis state machine."""

import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES, shares_fairly
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import (
    UNTIL_JOINED,
    BatchKey,
    FinishReason,
    ImageFinished,
    ImageProgress,
    ItemId,
    IterationResult,
    MeasuredTimings,
    RequestFinished,
    RequestTimings,
    SchedulableRequest,
    SchedulerSnapshot,
)
from searching import examples

SMALL, LARGE = BatchKey(64, 64), BatchKey(128, 96)
SHOWN = BatchKey(64, 64, reference_px=128 * 96)  # with reference images
STAGED = BatchKey(64, 64, ModelKey("staged"))  # key of a model with two stages, which mixes no sizes


def make_request(attempt_id="a", calls=2, images=1, batch_key=SMALL, expires_at=None, **more):
    return SchedulableRequest(attempt_id, batch_key, images, calls, expires_at, **more)


def make_result(text_encode_s=0.0, step_s=0.0, decode_s=0.0, image_encode_s=0.0, **result):
    by_phase = {"encodes": image_encode_s, "joins": text_encode_s, "steps": step_s, "decodes": decode_s}
    timings = MeasuredTimings({phase: seconds for phase, seconds in by_phase.items() if seconds})
    return IterationResult(**{"phase_timings": timings if timings.by_phase else None} | result)


class PendingTimings:
    """Timings that are not known yet: reading a duration fails the test."""

    is_known = False


def run_iteration(scheduler, now=0.0, **result):
    plan = scheduler.plan(now)
    return plan, scheduler.commit(plan, make_result(**result), now)


def test_an_image_joins_in_the_lowest_free_slot():
    scheduler = StepScheduler(3)
    for name in "abc":
        scheduler.submit(make_request(name, calls=9), now=0.0)
    plan, _ = run_iteration(scheduler)
    assert [assignment.slot for assignment in plan.joins] == [0, 1, 2]
    for name in "ca":
        scheduler.cancel(name, now=1.0)
    scheduler.submit(make_request("d"), now=1.0)
    plan, _ = run_iteration(scheduler)
    assert [assignment.slot for assignment in plan.joins] == [0]


def test_a_request_joins_steps_through_its_table_and_leaves():
    scheduler = StepScheduler(4)
    assert scheduler.submit(make_request(calls=2), now=1.0) == []
    first, events = run_iteration(scheduler, now=2.0, text_encode_s=0.125, image_encode_s=0.0625)
    assert [assignment.slot for assignment in first.joins] == [0]
    assert [(step.slot, step.call) for step in first.steps] == [(0, 0)]
    assert first.decodes == ()
    assert events == []
    second, events = run_iteration(scheduler, now=3.0, decode_s=0.25)
    assert second.joins == ()
    assert [step.call for step in second.steps] == [1]
    assert [assignment.image for assignment in second.decodes] == [ItemId("a", 0)]
    decoded, ended = events
    assert decoded == ImageFinished(ItemId("a", 0))
    assert (ended.finish_reason, ended.timings.queue_s, ended.timings.decode_s, ended.timings.denoise_s) == (
        FinishReason.FINISHED,
        1.0,
        0.25,
        1.0 - 0.125 - 0.0625 - 0.25,
    )
    assert scheduler.plan(4.0) is None
    assert scheduler.num_running == 0


def test_timings_include_the_mean_batch_size():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=4), 0)
    run_iteration(scheduler)
    scheduler.submit(make_request("b", calls=2), 0)
    run_iteration(scheduler)
    _, events = run_iteration(scheduler)
    assert events[-1].timings.mean_batch == 2.0  # b always shared its batch
    _, events = run_iteration(scheduler)
    assert events[-1].timings.mean_batch == (1 + 2 + 2 + 1) / 4


def test_a_cancelled_request_has_timings():
    scheduler = StepScheduler(2)
    scheduler.submit(make_request("a", calls=9, images=2), now=2.0, arrived_at=1.0)
    scheduler.submit(make_request("b", calls=9), now=2.0)
    run_iteration(scheduler, now=3.0, text_encode_s=0.25)
    (ended,) = scheduler.cancel("b", now=5.0)
    assert (ended.finished_at, ended.timings) == (5.0, RequestTimings(queue_s=3.0))
    run_iteration(scheduler, now=5.0)
    (ended,) = scheduler.cancel("a", now=7.0)
    assert (ended.finished_at, ended.timings) == (
        7.0,
        RequestTimings(
            queue_s=2.0, slot_s=4.0, join_timings=MeasuredTimings({"joins": 0.25}), mean_batch=2.0, num_calls=2
        ),
    )


def test_images_of_two_stages_take_turns_and_share_the_calls_of_each():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=3, second_stage_from=1), 0)
    scheduler.submit(make_request("b", calls=3), 0)
    scheduler.submit(make_request("c", calls=4, second_stage_from=2), 0)
    plans = []
    while scheduler.num_running or scheduler.num_waiting:
        plans.append(run_iteration(scheduler)[0])
    assert [[(step.image.attempt_id, step.call) for step in plan.steps] for plan in plans] == [
        [("a", 0), ("b", 0), ("c", 0)],
        [("a", 1)],
        [("b", 1), ("c", 1)],
        [("a", 2), ("c", 2)],
        [("b", 2)],
        [("c", 3)],
    ]


def test_a_second_stage_that_runs_out_of_memory_has_half_the_rows_and_the_first_as_many_as_before():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=2, images=4, second_stage_from=1), 0)
    assert len(run_iteration(scheduler)[0].steps) == 4
    assert len(run_iteration(scheduler, oom_phase="steps")[0].steps) == 4
    assert [len(run_iteration(scheduler)[0].steps) for _ in range(2)] == [2, 2]
    scheduler.submit(make_request("b", calls=2, images=4, second_stage_from=1), 0)
    assert len(run_iteration(scheduler)[0].steps) == 4


def test_images_of_both_stages_are_decoded_together():
    scheduler = StepScheduler(4, decode_batch=2)
    scheduler.submit(make_request("a", calls=2, images=3, second_stage_from=1), 0)
    scheduler.submit(make_request("b", calls=2), 0)
    decoded = []
    while scheduler.num_running or scheduler.num_waiting:
        decoded.append([each.image.attempt_id for each in run_iteration(scheduler)[0].decodes])
    assert decoded == [[], ["a", "a"], ["a", "b"]]


def test_a_second_pass_steps_and_is_decoded_with_images_of_its_size():
    scheduler = StepScheduler(4)
    larger = {"second_stage_px": (LARGE.width_px, LARGE.height_px)}
    scheduler.submit(make_request("passes", calls=3, second_stage_from=1, **larger), 0)
    scheduler.submit(make_request("small", calls=1), 0)
    scheduler.submit(make_request("large", calls=3, batch_key=LARGE), 0)
    steps, decodes = [], []
    while scheduler.num_running or scheduler.num_waiting:
        plan = run_iteration(scheduler)[0]
        steps.append([(step.image.attempt_id, step.call) for step in plan.steps])
        decodes += [{each.image.attempt_id for each in plan.decodes}]
    assert steps[:2] == [[("passes", 0), ("small", 0)], [("passes", 1), ("large", 0)]]
    assert {"small"} in decodes
    assert not any({"small"} < decoded for decoded in decodes)


def test_decodes_of_a_second_pass_that_do_not_fit_are_fewer_of_its_size_alone():
    scheduler = StepScheduler(8, decode_batch=4)
    larger = {"second_stage_px": (LARGE.width_px, LARGE.height_px)}
    scheduler.submit(make_request("a", calls=2, images=4, second_stage_from=1, **larger), 0)
    run_iteration(scheduler)
    assert len(run_iteration(scheduler, oom_phase="decodes")[0].decodes) == 4
    assert len(run_iteration(scheduler)[0].decodes) == 2
    scheduler.submit(make_request("small", calls=1, images=4), 0)
    decoded = []
    while scheduler.num_running or scheduler.num_waiting:
        decoded.append([each.image.attempt_id for each in run_iteration(scheduler)[0].decodes])
    assert ["small"] * 4 in decoded
    assert ["a"] * 2 in decoded


def test_cancel_after_finish_does_nothing():
    scheduler = StepScheduler(1)
    scheduler.submit(make_request("a", calls=1), 0)
    run_iteration(scheduler)
    assert scheduler.cancel("a", 0) == []
    assert scheduler.cancel("unknown", 0) == []


def test_a_failed_image_fails_its_request_and_no_other():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=3, images=2), 0)
    scheduler.submit(make_request("b", calls=3), 0)
    _, events = run_iteration(scheduler, failed={ItemId("a", 1): "not finite"})
    assert [(event.attempt_id, event.finish_reason, event.message) for event in events] == [
        ("a", FinishReason.FAILED, "not finite")
    ]
    plan, _ = run_iteration(scheduler)
    assert [step.image.attempt_id for step in plan.steps] == ["b"]


def test_requests_expire_whether_running_or_waiting():
    scheduler = StepScheduler(1)
    scheduler.submit(make_request("runs", calls=9, expires_at=5.0), 0)
    scheduler.submit(make_request("waits", calls=9, expires_at=7.0), now=1.0)
    scheduler.submit(make_request("patient", calls=9), 0)
    run_iteration(scheduler)
    assert scheduler.expire(4.9) == []
    ended = scheduler.expire(7.0)
    assert [event.attempt_id for event in ended] == ["runs", "waits"]
    assert ended[1].message.startswith("it did not finish within 6.00 s")
    assert run_iteration(scheduler)[0].joins[0].image.attempt_id == "patient"


def test_a_full_queue_rejects_at_once_and_reports_its_length():
    scheduler = StepScheduler(1, queue_limit=2)
    scheduler.submit(make_request("a", images=2), 0)
    (rejected,) = scheduler.submit(make_request("b", images=2), now=3.0, arrived_at=1.0)
    assert (rejected.finish_reason, rejected.finished_at) == (FinishReason.REJECTED, 3.0)
    assert rejected.timings == RequestTimings(queue_s=2.0)
    assert "2 images are waiting, the limit is 2" in rejected.message
    assert scheduler.submit(make_request("c", images=1), 0) == []


def test_the_backlog_counts_waiting_and_running_images():
    scheduler = StepScheduler(1, costs=known_costs())
    scheduler.submit(make_request("a", calls=5, images=2), 0)
    assert scheduler.backlog_s == pytest.approx(10.0)
    run_iteration(scheduler)
    assert scheduler.backlog_s == pytest.approx(9.0)


def test_the_oldest_age_is_of_waiting_requests_and_counts_from_arrival():
    scheduler = StepScheduler(1)
    assert scheduler.oldest_age_s(1.0) == 0.0
    scheduler.submit(make_request("a"), 1.0)
    run_iteration(scheduler, 1.0)
    assert scheduler.oldest_age_s(5.0) == 0.0  # it has its slot
    scheduler.submit(make_request("b"), 3.0, arrived_at=2.0)
    scheduler.submit(make_request("c"), 4.0)
    assert scheduler.oldest_age_s(5.0) == 3.0


def known_costs():
    """A second for every row of a call: batching gains nothing."""
    costs = CostModel(max_rows=8)
    for batch_key in (SMALL, LARGE):
        costs.steps[batch_key] = CostCurve({1: 1.0, 8: 8.0})
    return costs


def test_a_queue_with_too_many_seconds_of_work_rejects():
    scheduler = StepScheduler(1, queue_limit_s=10.0, costs=known_costs())
    assert scheduler.submit(make_request("long", calls=50), 0) == []  # an empty queue takes any request
    run_iteration(scheduler)
    assert scheduler.submit(make_request("next", calls=5), 0) == []  # no request waits yet
    (rejected,) = scheduler.submit(make_request("late", calls=5), 0)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.REJECTED, pytest.approx(49.0))
    assert "it holds 54.00 s of work, the limit is 10 s" in rejected.message


def test_a_deadline_that_cannot_be_met_is_rejected_with_the_predicted_finish():
    scheduler = StepScheduler(2, costs=known_costs())
    (rejected,) = scheduler.submit(make_request("never", calls=5, deadline=4.0), 0)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.UNMEETABLE, None)
    assert rejected.message == (
        "it would finish in 5.00 s, its deadline is in 4.00 s; even on an idle server it takes 5.00 s"
    )
    assert scheduler.submit(make_request("mine", calls=5, deadline=7.0), 0) == []
    (rejected,) = scheduler.submit(make_request("second", calls=5, deadline=8.0), 0)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.UNMEETABLE, pytest.approx(2.0))
    assert "10.00 s" in rejected.message and "8.00 s" in rejected.message


def test_a_request_that_would_break_an_accepted_deadline_is_rejected():
    scheduler = StepScheduler(2, costs=known_costs())
    assert scheduler.submit(make_request("accepted", calls=5, deadline=7.0), 0) == []
    (rejected,) = scheduler.submit(make_request("pushing", calls=3, deadline=7.0), 0)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.UNMEETABLE, 7.0)
    assert "only if a request accepted before missed its own" in rejected.message
    assert scheduler.submit(make_request("patient", calls=3), 0) == []  # it has no deadline


def test_the_most_urgent_image_joins_and_steps_first():
    scheduler = StepScheduler(2, costs=known_costs())
    scheduler.costs.record_oom(SMALL, 2)  # one row a call
    scheduler.submit(make_request("patient", calls=3), 0)
    plan, _ = run_iteration(scheduler, 0.0)
    assert [step.image.attempt_id for step in plan.steps] == ["patient"]
    scheduler.submit(make_request("high", calls=2, priority="high"), 1.0)
    scheduler.submit(make_request("low", calls=2, priority="low"), 1.0)
    plan, _ = run_iteration(scheduler, 1.0)
    assert [assignment.image.attempt_id for assignment in plan.joins] == ["high"]
    assert [step.image.attempt_id for step in plan.steps] == ["high"]  # "patient" is paused
    plan, _ = run_iteration(scheduler, 2.0)
    assert [assignment.image.attempt_id for assignment in plan.decodes] == ["high"]
    plan, _ = run_iteration(scheduler, 3.0)
    assert [(step.image.attempt_id, step.call) for step in plan.steps] == [("patient", 1)]


@pytest.mark.parametrize("num_of_other", [1, 2])
def test_the_size_of_one_client_gets_as_many_calls_as_that_of_anothers_heap(num_of_other):
    costs = CostModel(steps={key: CostCurve({1: 1.0, 8: 1.0}) for key in (SMALL, LARGE)})
    scheduler = StepScheduler(8, costs=costs, policy=POLICIES["fair"])
    scheduler.submit(make_request("heap", calls=99, images=6, client="a"), 0.0)
    scheduler.submit(make_request("own", calls=99, images=num_of_other, batch_key=LARGE, client="b"), 0.0)
    own = [run_iteration(scheduler)[0].steps[0].image.attempt_id == "own" for _ in range(16)]
    assert abs(sum(own) - 8) <= 1


def test_an_exclusive_request_shares_the_batch_with_no_other():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("before", calls=2), 0)
    run_iteration(scheduler)
    scheduler.submit(make_request("suspect", calls=2, images=2, exclusive=True), 0)
    scheduler.submit(make_request("after", calls=1), 0)
    joined = []
    while (plan := scheduler.plan(0)) is not None:
        joined.append([assignment.image.attempt_id for assignment in plan.joins])
        assert len({step.image.attempt_id for step in plan.steps}) == 1
        scheduler.commit(plan, IterationResult(), 0)
    assert joined == [[], ["suspect", "suspect"], [], ["after"]]


def test_steps_that_run_out_of_memory_have_half_the_rows_from_then_on():
    scheduler = StepScheduler(4, costs=known_costs())
    scheduler.submit(make_request("a", calls=2, images=4), 0)
    plan, events = run_iteration(scheduler, oom_phase="steps")
    assert (len(plan.steps), events) == (4, [])
    plan, _ = run_iteration(scheduler)
    assert [(step.image.index, step.call) for step in plan.steps] == [(0, 0), (1, 0)]


def test_an_image_that_does_not_fit_alone_fails_with_the_reason():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a"), 0)
    _, events = run_iteration(scheduler, oom_phase="steps")
    assert [(event.finish_reason, event.message) for event in events] == [
        (FinishReason.FAILED, "64x64 pixels do not fit the device's memory, even alone")
    ]


def test_decodes_that_run_out_of_memory_have_half_the_images_from_then_on():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=1, images=4), 0)
    sizes = [len(run_iteration(scheduler, oom_phase="decodes")[0].decodes)]
    while scheduler.num_running:
        sizes.append(len(run_iteration(scheduler)[0].decodes))
    assert sizes == [4, 2, 2]


def test_an_image_whose_batch_ran_out_of_memory_does_not_fail_when_the_others_were_cancelled():
    for phase in ("steps", "decodes"):
        scheduler = StepScheduler(4)
        scheduler.submit(make_request("a", calls=1), 0)
        scheduler.submit(make_request("b", calls=1), 0)
        plan = scheduler.plan(0)
        scheduler.cancel("b", 0)
        assert scheduler.commit(plan, IterationResult(oom_phase=phase), 0) == []
        assert [event.attempt_id for event in run_iteration(scheduler)[1][-1:]] == ["a"]


def test_limits_stay_when_all_images_that_ran_out_of_memory_were_cancelled():
    scheduler = StepScheduler(4, costs=known_costs())
    scheduler.submit(make_request("a"), 0)
    plan = scheduler.plan(0)
    scheduler.cancel("a", 0)
    assert scheduler.commit(plan, IterationResult(oom_phase="steps"), 0) == []
    assert scheduler.costs.rows_limit(SMALL) == 8


def test_joins_that_run_out_of_memory_are_halved():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=9, images=4), 0)
    run_iteration(scheduler, oom_phase="joins")
    plan, _ = run_iteration(scheduler)
    assert [assignment.image.index for assignment in plan.joins] == [0, 1]


def test_an_image_that_never_fits_does_not_shrink_the_batch_for_others():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("two", calls=3), 0)
    run_iteration(scheduler)
    scheduler.submit(make_request("huge", calls=9, batch_key=LARGE), 0)
    ends = []
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.plan(0)
        huge = any(assignment.image.attempt_id == "huge" for assignment in plan.joins)
        ends += scheduler.commit(plan, IterationResult(oom_phase="joins" if huge else None), 0)
    assert {event.attempt_id: event.finish_reason for event in ends if isinstance(event, RequestFinished)} == {
        "huge": FinishReason.FAILED,
        "two": FinishReason.FINISHED,
    }
    scheduler.submit(make_request("many", images=4), 0)
    assert len(run_iteration(scheduler)[0].joins) == 4


def submit_start_images(scheduler, names, batch_key=SMALL, **fields):
    for name in names:
        scheduler.submit(make_request(name, batch_key=batch_key, has_start_image=True, **fields), 0)


def names_of(assignments):
    return "".join(assignment.image.attempt_id for assignment in assignments)


def test_an_iteration_encodes_a_few_start_images_of_one_size_and_others_join_before_the_rest():
    scheduler = StepScheduler(16, decode_batch=2)
    submit_start_images(scheduler, "ab", calls=9)
    submit_start_images(scheduler, "L", LARGE, calls=9)
    submit_start_images(scheduler, "cde", calls=9, images=2)
    scheduler.submit(make_request("t", calls=9), 0)
    plans = [run_iteration(scheduler)[0] for _ in range(5)]
    assert [names_of(plan.encodes) for plan in plans] == ["ab", "L", "cd", "e", ""]
    assert [names_of(plan.joins) for plan in plans] == ["abt", "L", "ccdd", "ee", ""]


def test_a_start_image_is_encoded_once_for_images_that_join_later():
    scheduler = StepScheduler(1)
    submit_start_images(scheduler, "a", calls=1, images=3)
    plans = [run_iteration(scheduler)[0] for _ in range(3)]
    assert [(names_of(plan.encodes), names_of(plan.joins)) for plan in plans] == [("a", "a"), ("", "a"), ("", "a")]


def test_start_images_that_run_out_of_memory_are_encoded_in_halves_and_nothing_else_changes():
    scheduler = StepScheduler(8)
    scheduler.submit(make_request("t", calls=9), 0)
    submit_start_images(scheduler, "abcd", calls=9)
    plan, events = run_iteration(scheduler, oom_phase="encodes")
    assert (names_of(plan.encodes), events, scheduler.num_running) == ("abcd", [], 0)
    plans = [run_iteration(scheduler)[0] for _ in range(2)]
    assert [(names_of(plan.encodes), names_of(plan.joins)) for plan in plans] == [("ab", "tab"), ("cd", "cd")]


def test_a_start_image_that_does_not_fit_beside_others_waits_and_one_that_never_fits_fails():
    scheduler = StepScheduler(8)
    scheduler.submit(make_request("t", calls=2), 0)
    run_iteration(scheduler)
    submit_start_images(scheduler, "a")
    assert names_of(run_iteration(scheduler, oom_phase="encodes")[0].encodes) == "a"
    assert names_of(run_iteration(scheduler)[0].joins) == ""  # the last step of t
    plan, events = run_iteration(scheduler, oom_phase="encodes")
    assert (names_of(plan.encodes), [event.finish_reason for event in events]) == ("a", [FinishReason.FAILED])
    scheduler.submit(make_request("many", images=8), 0)
    assert len(run_iteration(scheduler)[0].joins) == 8


def test_images_join_again_when_the_start_images_that_ran_out_of_memory_were_cancelled():
    scheduler = StepScheduler(4)
    submit_start_images(scheduler, "a")
    scheduler.submit(make_request("t"), 0)
    plan = scheduler.plan(0)
    scheduler.cancel("a", 0)
    assert scheduler.commit(plan, IterationResult(oom_phase="encodes"), 0) == []
    assert names_of(run_iteration(scheduler)[0].joins) == "t"


def test_start_images_have_costs_of_their_own_by_size():
    scheduler = StepScheduler(8, decode_batch=2)
    submit_start_images(scheduler, "ab")
    run_timed_iteration(scheduler, image_encode_s=0.5, text_encode_s=0.25, step_s=1.0)
    costs = scheduler.costs
    assert (costs.image_encode_s(SMALL, 2), costs.text_encode_s(ModelKey())) == (0.5, 0.125)
    assert costs.image_encode_s(LARGE, 2) == pytest.approx(0.5 * 3**1.1)  # cost of three times the area


def test_a_request_is_accepted_by_what_its_start_image_costs():
    costs = known_costs()
    costs.image_encodes = {SMALL: CostCurve({1: 5.0})}
    scheduler = StepScheduler(4, costs=costs, queue_limit_s=8.0)
    assert scheduler.submit(make_request("t", calls=2, deadline=6.0), 0) == []
    run_iteration(scheduler)
    (rejection,) = scheduler.submit(make_request("a", calls=2, deadline=6.0, has_start_image=True), 0)
    assert rejection.finish_reason is FinishReason.UNMEETABLE
    assert "even on an idle server it takes 7.00 s" in rejection.message
    before_s = scheduler.backlog_s
    submit_start_images(scheduler, "b")
    assert scheduler.backlog_s - before_s > 5.0
    run_iteration(scheduler)  # encodes it
    assert scheduler.backlog_s < 5.0
    submit_start_images(scheduler, "c")
    (rejection,) = scheduler.submit(make_request("d", has_start_image=True), 0)
    assert rejection.finish_reason is FinishReason.REJECTED


def run_timed_iteration(scheduler, **result):
    """Run an iteration of 2.0 s."""
    plan = scheduler.plan(0)
    scheduler.commit(plan, make_result(**result), 2.0, 2.0)
    return plan


def test_timed_phases_update_the_costs():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=1, images=2, rows=2), 0)
    run_timed_iteration(scheduler, text_encode_s=0.25, decode_s=0.5, step_s=1.0)
    costs = scheduler.costs
    assert (costs.text_encode_s(ModelKey()), costs.decode_s(SMALL, 2), costs.step_s(SMALL, 4)) == (0.125, 0.5, 1.0)


def test_prompts_of_two_models_in_one_iteration_do_not_update_costs():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", batch_key=BatchKey(64, 64, ModelKey("m", "1"))), 0)
    scheduler.submit(make_request("b", batch_key=BatchKey(64, 64, ModelKey("m", "2"))), 0)
    run_timed_iteration(scheduler, text_encode_s=0.25, step_s=1.0)
    assert scheduler.costs.text_encode_s_by_model == {}


def test_known_decode_costs_are_subtracted_when_only_iterations_are_timed():
    """The decode and the step can have different keys; the pending timings are never read."""
    costs = CostModel(decodes={SMALL: CostCurve({1: 0.5}), LARGE: CostCurve({1: 1.5})})
    scheduler = StepScheduler(4, decode_batch=1, costs=costs)
    scheduler.submit(make_request("a", calls=1, images=2, batch_key=LARGE), 0)
    scheduler.commit(scheduler.plan(0), IterationResult(), 0.0)
    scheduler.submit(make_request("b", calls=5), 0)
    plan = run_timed_iteration(scheduler, phase_timings=PendingTimings(), join_s=0.1)
    assert ([each.image.attempt_id for each in plan.steps], len(plan.decodes)) == (["b"], 1)
    assert costs.step_s(SMALL, 1) == pytest.approx(2.0 - 1.5 - 0.1)
    assert costs.decode_s(LARGE) == 1.5
    assert costs.text_encode_s(ModelKey()) == 0.0


def test_an_iteration_with_a_cancelled_request_does_not_update_costs():
    scheduler = StepScheduler(4)
    scheduler.submit(make_request("a", calls=1), 0)
    scheduler.submit(make_request("b", calls=1), 0)
    plan = scheduler.plan(0)
    scheduler.cancel("b", 0)
    scheduler.commit(plan, make_result(step_s=1.0), 1.0, 1.0)
    assert scheduler.costs.steps == {}


def test_a_snapshot_lists_running_images_by_slot_and_waiting_requests_in_order():
    costs = CostModel()
    costs.observe_step(SMALL, 1, 1.0)
    costs.observe_step(SMALL, 2, 1.0)
    scheduler = StepScheduler(2, costs=costs, policy=POLICIES["fcfs"])
    assert scheduler.snapshot(0.0, 9) == SchedulerSnapshot((), ())
    scheduler.submit(make_request("a", calls=4), 1.0)
    run_iteration(scheduler, now=2.0)
    scheduler.submit(make_request("b", calls=2, images=3), 3.0)
    scheduler.submit(make_request("c", calls=2), 4.0)
    run_iteration(scheduler, now=5.0)
    snapshot = scheduler.snapshot(6.0, 9)
    first, second = snapshot.running
    assert (first.image, first.slot, first.call, first.joined_at) == (ItemId("a", 0), 0, 2, 2.0)
    assert (second.image, second.slot, second.call, second.joined_at) == (ItemId("b", 0), 1, 1, 5.0)
    assert (second.finish_in_s, first.finish_in_s) == (1.0, 2.0)
    b, c = snapshot.waiting
    assert (b.request.attempt_id, b.num_images, b.arrived_at, b.start_in_s) == ("b", 2, 3.0, 1.0)
    assert (c.request.attempt_id, c.num_images, c.arrived_at, c.start_in_s) == ("c", 1, 4.0, 3.0)
    assert scheduler.snapshot(6.0, 1).waiting == (b,)


def test_progress_leaves_out_unknown_requests():
    scheduler = StepScheduler(1, costs=known_costs())
    assert scheduler.progress(["unknown"], 0.0) == {}
    scheduler.submit(make_request("a", calls=2, images=2), 0)
    run_iteration(scheduler)
    progress = scheduler.progress(["a", "unknown"], 0.0)["a"]
    assert (progress.queue_position, progress.call, progress.start_in_s, progress.finish_in_s) == (0, 0, 0.0, 3.0)


def test_queue_time_counts_from_arrival_and_predictions_from_now():
    scheduler = StepScheduler(1, costs=known_costs())
    (rejected,) = scheduler.submit(make_request("a", calls=5, deadline=8.0), 4.0, arrived_at=2.0)
    assert "it would finish in 5.00 s, its deadline is in 4.00 s" in rejected.message
    scheduler.submit(make_request("b", calls=1), 4.0, arrived_at=2.0)
    _, (_, ended) = run_iteration(scheduler, 5.0)
    assert ended.timings.queue_s == 3.0


def test_an_untimed_iteration_does_not_update_costs():
    scheduler = StepScheduler(1, costs=known_costs())
    scheduler.submit(make_request("a", calls=3), 0)
    for seconds, is_timed in ((0.01, False), (1.0, True)):
        plan = scheduler.plan(0)
        scheduler.commit(plan, IterationResult(is_timed=is_timed), 0.0, seconds)
        assert scheduler.costs.slowdown == pytest.approx(1.0)


def test_nothing_of_a_forgotten_model_is_left_and_the_others_keep_theirs():
    gone = SMALL._replace(model=ModelKey("gone"))
    scheduler = StepScheduler(4)
    for batch_key in (SMALL, gone):
        for name in ("a", "b"):
            scheduler.submit(make_request(name, calls=2, batch_key=batch_key), 0)
        scheduler.commit(scheduler.plan(0), make_result(step_s=1.0), 0, 1.0)
        scheduler.commit(scheduler.plan(0), IterationResult(oom_phase="decodes"), 0, 1.0)
        while (plan := scheduler.plan(0)) is not None:
            scheduler.commit(plan, make_result(decode_s=1.0), 0, 1.0)
    known = (scheduler.costs.steps, scheduler._predictor._expected_batch_size, scheduler._decode_limits)
    assert [set(each) for each in known] == [{SMALL, gone}] * 3
    scheduler.forget_model(gone.model)
    known = (scheduler.costs.steps, scheduler._predictor._expected_batch_size, scheduler._decode_limits)
    assert [set(each) for each in known] == [{SMALL}] * 3


def test_a_request_goes_on_where_another_engine_has_released_it():
    source = StepScheduler(2)
    source.submit(make_request("a", calls=4, images=4), now=1.0)
    source.submit(make_request("b", calls=9), now=1.0)
    for _ in range(5):
        run_iteration(source, now=2.0)
    released = source.release("a", now=7.0)
    assert [(each.image.index, each.slot, each.progress) for each in released.images] == [
        (2, 0, ImageProgress(1, 2)),
        (3, 1, ImageProgress(1, 2)),
    ]
    assert (released.timings.queue_s, released.timings.slot_s, released.timings.num_calls) == (1.0, 5.0, 1)
    assert (source.num_running, source.num_waiting) == (0, 1)
    assert source.release("a", now=7.0) is None

    target = StepScheduler(1, queue_limit=0, costs=known_costs())
    target.submit(make_request("c", calls=1), now=7.0)
    resumed = {2: released.images[0].progress, 3: released.images[1].progress}
    assert target.submit(make_request("d", calls=4), now=7.0)  # rejected: the queue is full
    assert target.submit(make_request("a", calls=4, images=4, resumed=resumed, waited_s=6.0), now=8.0) == []
    assert target.progress(["a"], 8.0)["a"].call == 1
    steps, ended = [], None
    while (plan := target.plan(9.0)) is not None:
        steps += [(step.image.attempt_id, step.image.index, step.call) for step in plan.steps]
        ended = target.commit(plan, make_result(), 9.0)[-1:] or ended
    assert steps == [("a", 2, 1), ("a", 2, 2), ("a", 2, 3), ("a", 3, 1), ("a", 3, 2), ("a", 3, 3), ("c", 0, 0)]


def test_a_request_of_another_engine_keeps_its_place_and_its_batch_sizes():
    scheduler = StepScheduler(1)
    scheduler.submit(make_request("later"), now=10.0)
    scheduler.submit(make_request("moved", resumed={0: ImageProgress(1, 5)}, waited_s=4.0), now=12.0)
    plan, events = run_iteration(scheduler, now=12.0)
    assert names_of(plan.joins) == "moved"
    assert (events[-1].timings.mean_batch, events[-1].timings.queue_s) == (3.0, 0.0)


def test_an_image_whose_decode_is_left_is_decoded_when_it_joins():
    scheduler = StepScheduler(1)
    scheduler.submit(make_request("a", calls=2, resumed={0: ImageProgress(2, 2)}), now=0.0)
    assert scheduler.progress(["a"], 0.0)["a"].call == 2
    plan, events = run_iteration(scheduler)
    assert (plan.steps, names_of(plan.decodes)) == ((), "a")
    assert events[-1].finish_reason is FinishReason.FINISHED
    assert scheduler.backlog_s == 0.0


SHARE = {"client": st.sampled_from(["", "a", "b"]), "weight": st.sampled_from([1.0, 0.25])}


class SchedulerMachine(RuleBasedStateMachine):
    """In any sequence of events, no slot leaks, no image is lost or generated twice, every request ends once."""

    requests = Bundle("requests")
    scheduler: StepScheduler

    @initialize(
        policy=st.sampled_from(list(POLICIES)),
        costs=st.booleans(),
        call_size=st.sampled_from([None, (0, 0)]),
        num_calls=st.lists(st.integers(2, 9), min_size=2, max_size=3),
        urgent_client=st.sampled_from(["", "a", "b"]),
        client=st.sampled_from(["", "a", "b"]),
    )
    def start(self, policy, costs, call_size, num_calls, client, urgent_client):
        """The images that are there already may be evicted, and some are."""
        self.call_size = call_size
        known = known_costs() if costs else CostModel()
        self.scheduler = StepScheduler(
            num_slots=3, decode_batch=2, queue_limit=6, queue_limit_s=30.0, policy=POLICIES[policy], costs=known
        )
        for number, calls in enumerate(num_calls):
            request = make_request(f"first{number}", calls, 2, priority="low", client=client, call_size=call_size)
            self.submitted(request)
        self.run_iterations(1)
        self.submit_urgent(2, 2, {"client": urgent_client})
        self.run_iterations(1)

    def __init__(self):
        super().__init__()
        self.now, self.count = 0.0, 0
        self.open: dict[str, SchedulableRequest] = {}
        self.ended: set[str] = set()
        self.encoded: set[str] = set()
        self.calls_made: dict[ItemId, int] = {}
        self.decoded: set[ItemId] = set()
        self.held: dict[ItemId, int] = {}  # slots of images that have joined
        self.evicted: set[ItemId] = set()
        self.plan = None

    def record(self, events):
        for event in events:
            if isinstance(event, RequestFinished):
                assert event.attempt_id not in self.ended, "ended twice"
                self.ended.add(event.attempt_id)
                done = self.open.pop(event.attempt_id)
                if event.finish_reason is FinishReason.FINISHED:
                    images = [ItemId(done.attempt_id, k) for k in range(done.num_images)]
                    assert all(self.calls_made[image] == done.num_calls for image in images)
            else:
                assert self.calls_made[event.image] == self.open[event.image.attempt_id].num_calls
                self.decoded.add(event.image)

    @rule(
        target=requests,
        calls=st.integers(1, 4),
        images=st.integers(1, 4),
        batch_key=st.sampled_from([SMALL, LARGE, SHOWN, STAGED]),
        timeout_s=st.none() | st.floats(0, 20),
        deadline_s=st.none() | st.floats(0, 20),
        num_first_calls=st.none() | st.integers(1, 3),
        second_stage_px=st.sampled_from([None, (LARGE.width_px, LARGE.height_px)]),
        others=st.fixed_dictionaries(
            {
                "rows": st.integers(1, 2),
                "exclusive": st.booleans() | st.just(False),
                "priority": st.sampled_from(["low", "normal", "high"]),
                "has_start_image": st.booleans(),
                **SHARE,
            }
        ),
    )
    def submit(self, calls, images, batch_key, timeout_s, deadline_s, num_first_calls, second_stage_px, others):
        self.count += 1
        has_stages = batch_key == STAGED and num_first_calls is not None and num_first_calls < calls
        request = make_request(
            f"r{self.count}",
            calls,
            images,
            batch_key,
            None if timeout_s is None else self.now + timeout_s,
            deadline=None if deadline_s is None else self.now + deadline_s,
            call_size=None if batch_key == STAGED else self.call_size,
            second_stage_from=num_first_calls if has_stages else None,
            second_stage_px=second_stage_px if has_stages else None,
            between=((STAGED._replace(stage=7), num_first_calls),) if has_stages and second_stage_px else (),
            **others,
        )
        return self.submitted(request)

    def submitted(self, request):
        self.open[request.attempt_id] = request
        self.record(self.scheduler.submit(request, self.now))
        return request.attempt_id

    @rule(attempt_id=consumes(requests))
    def cancel(self, attempt_id):
        known = attempt_id in self.open
        events = self.scheduler.cancel(attempt_id, self.now)
        assert len(events) == known
        self.record(events)

    @rule(target=requests, attempt_id=consumes(requests))
    def move(self, attempt_id):
        """To another engine, and back before it has done anything."""
        released = self.scheduler.release(attempt_id, self.now)
        assert (released is None) == (attempt_id not in self.open)
        if released is None:
            return multiple()
        before, self.count = self.open.pop(attempt_id), self.count + 1
        begun = {each.image.index: each.progress for each in released.images}
        moved = msgspec.structs.replace(
            before,
            attempt_id=f"r{self.count}",
            deadline=None,
            waited_s=1.0,
            resumed={
                index: begun.get(index, before.progress_of(index))
                for index in before.indices
                if ItemId(attempt_id, index) not in self.decoded
            },
        )
        for index in range(before.num_images):
            call = moved.resumed[index].call if index in moved.resumed else before.num_calls
            self.calls_made[ItemId(moved.attempt_id, index)] = call
        self.open[moved.attempt_id] = moved
        assert self.scheduler.submit(moved, self.now) == []
        return moved.attempt_id

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.now += seconds
        self.record(self.scheduler.expire(self.now))
        assert all(each.expires_at is None or each.expires_at > self.now for each in self.open.values())

    @precondition(lambda self: self.plan is None)
    @rule()
    def plan_iteration(self):
        self.plan = self.scheduler.plan(self.now)
        if self.plan is None:
            assert not self.open, "idle with work to do"
            return
        assignments = [(step.image, step.slot) for step in self.plan.steps] + [
            (assignment.image, assignment.slot) for assignment in self.plan.decodes
        ]
        self.check_evictions()
        slots = {}
        for image, slot in assignments:
            assert image.attempt_id in self.open, "planned after it ended"
            assert slots.setdefault(slot, image) == image, "one slot, two images"
        requests = [self.open[step.image.attempt_id] for step in self.plan.steps]
        keys = [request.step_key(step.call) for request, step in zip(requests, self.plan.steps, strict=True)]
        assert len({request.call_key(key) for request, key in zip(requests, keys, strict=True)}) <= 1
        assert (
            len({self.open[assignment.image.attempt_id].last_key.decode_key for assignment in self.plan.decodes}) <= 1
        )
        assert len(self.plan.decodes) <= 2
        self.check_encodes()
        in_flight = {each.image.attempt_id for each in (*self.plan.steps, *self.plan.decodes)}
        assert len(in_flight) == 1 or not any(self.open[name].exclusive for name in in_flight), (
            "an exclusive request is not alone"
        )
        for step in self.plan.steps:
            assert step.call == self.calls_made.get(step.image, 0), "a row skipped or repeated"

    def check_evictions(self):
        planned = {each.image for part in (self.plan.joins, self.plan.steps, self.plan.decodes) for each in part}
        for each in self.plan.evictions:
            assert each.image not in planned
            assert not self.open[each.image.attempt_id].exclusive
            assert self.held[each.image] == each.slot, "evicted from a slot that it does not have"
            assert each.progress.call == self.calls_made.get(each.image, 0)
        assert {each.slot for each in self.plan.evictions} <= {each.slot for each in self.plan.joins}
        assert {each.image for each in self.plan.returns} == {each.image for each in self.plan.joins} & self.evicted
        table, predictor = self.scheduler._table, self.scheduler._predictor
        evicted = [table.evicted[each.image] for each in self.plan.evictions]
        joined = [table.running[each.image] for each in self.plan.joins]
        keys = predictor.policy_keys([*evicted, *joined], self.now)
        for each, other in itertools.product(joined, evicted):
            assert keys[each.image] < keys[other.image], "evicted for an image that steps later"

    def record_slots(self, plan, oom_phase):
        """Record which images have slots and which are evicted, if the executor does as planned."""
        if oom_phase == "evictions":
            return
        for each in plan.evictions:
            del self.held[each.image]
            self.evicted.add(each.image)
        for each in plan.joins if oom_phase not in UNTIL_JOINED else ():
            self.held[each.image] = each.slot
            self.evicted.discard(each.image)

    def check_encodes(self):
        encoding = [assignment.image.attempt_id for assignment in self.plan.encodes]
        assert len({self.open[attempt_id].batch_key for attempt_id in encoding}) <= 1
        assert len(encoding) <= 2
        assert set(self.plan.encodes) <= set(self.plan.joins)
        assert self.encoded.isdisjoint(encoding), "encoded twice"
        for each in self.plan.joins:
            name = each.image.attempt_id
            assert not self.open[name].has_start_image or name in self.encoded or name in encoding, "never encoded"

    @precondition(lambda self: self.plan is None)
    @rule(num=st.integers(1, 3))
    def run_iterations(self, num):
        for _ in range(num):
            self.plan_iteration()
            if self.plan is not None:
                self.commit(self.plan)

    @rule(target=requests, calls=st.integers(1, 4), images=st.integers(1, 3), share=st.fixed_dictionaries(SHARE))
    def submit_urgent(self, calls, images, share):
        self.count += 1
        return self.submitted(
            make_request(f"r{self.count}", calls, images, priority="high", call_size=self.call_size, **share)
        )

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def commit_iteration(self, data):
        named = [each.image for each in (*self.plan.steps, *self.plan.decodes)]
        failed = data.draw(st.sets(st.sampled_from(named), max_size=1)) if named else set()
        phases = [None, None, None, "evictions", "encodes", "joins", "steps", "decodes"]
        oom_phase = data.draw(st.sampled_from(phases))
        self.commit(self.plan, dict.fromkeys(failed, "selected at random"), oom_phase)

    def commit(self, plan, failed=None, oom_phase=None):
        self.now += 1.0
        self.record_slots(plan, oom_phase)
        if oom_phase not in ("evictions", "encodes"):
            self.encoded |= {assignment.image.attempt_id for assignment in plan.encodes}
        if oom_phase in (None, "decodes"):
            for step in plan.steps:
                self.calls_made[step.image] = step.call + 1
        self.record(self.scheduler.commit(plan, IterationResult(failed or {}, oom_phase), self.now, 1.0))
        self.plan = None

    @invariant()
    def shares_are_of_the_images_that_have_not_ended(self):
        table = self.scheduler._table
        if not shares_fairly(self.scheduler.policy):
            assert not table.shares._clients
            return
        for client in ("", "a", "b"):
            images = [each.undecoded for each in table.requests.values() if each.request.client == client]
            assert table.shares.num_images(client) == sum(map(len, images))
        turns = [
            turn for each in table.requests.values() if each.request.deadline is None for turn in each.turns.values()
        ]
        assert sorted(turns) == sorted(turn for each in table.shares._turns.values() for turn in each)
        assert table.requests or not table.shares._clients, "clients without work are remembered"

    @invariant()
    def the_backlogs_of_the_clients_are_that_of_all(self):
        parts_s = [self.scheduler._predictor.backlog_of(client) for client in ("", "a", "b")]
        assert sum(parts_s) == pytest.approx(self.scheduler.backlog_s)
        assert self.scheduler._table.requests or not self.scheduler._table.work_by_client

    @invariant()
    def every_slot_is_held_by_a_running_image_or_free(self):
        slots = [running.slot for running in self.scheduler._table.running.values()]
        assert sorted([*slots, *self.scheduler._table._free_slots]) == [0, 1, 2]
        # One client, or each of three whose shares changed, has at most the limit and what had slots.
        assert self.scheduler.num_waiting <= (6 + 3) * (3 if shares_fairly(self.scheduler.policy) else 1)
        assert self.scheduler.num_evicted <= min(3, self.scheduler.num_waiting)
        if self.plan is None:
            known = {image for image in self.evicted if image.attempt_id in self.open and image not in self.decoded}
            assert set(self.scheduler._table.evicted) == known

    def teardown(self):
        if self.plan is not None:
            for step in self.plan.steps:
                self.calls_made[step.image] = step.call + 1
            self.record(self.scheduler.commit(self.plan, IterationResult(), self.now))
        for _ in range(400):
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            for step in plan.steps:
                assert step.call == self.calls_made.get(step.image, 0), "a row skipped or repeated"
                self.calls_made[step.image] = step.call + 1
            self.record(self.scheduler.commit(plan, IterationResult(), self.now))
        assert not self.open, f"never ended: {self.open}"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("num_images", "num_stepped"), [(3, 2), (6, 4)])
def test_a_deadline_makes_calls_small_only_while_they_have_room_for_all_images(num_images, num_stepped):
    """Not while slots are free: of hundreds nearly all are. The deadline allows two rows in a call, a second each."""
    costs = CostModel(4, {SMALL: CostCurve({1: 1.0, 4: 4.0})})
    scheduler = StepScheduler(64, costs=costs, policy=POLICIES["least-slack"])
    scheduler.submit(make_request("urgent", calls=5, deadline=14.0), 0.0)
    for number in range(num_images - 1):
        scheduler.submit(make_request(f"r{number}", calls=5), 0.0)
    plan, _ = run_iteration(scheduler)
    assert (len(plan.joins), len(plan.steps)) == (num_images, num_stepped)
