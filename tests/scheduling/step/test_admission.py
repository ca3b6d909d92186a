"""Rejections, and which accepted deadlines a new request would break."""

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import least_slack
from noria.scheduling.step.admission import AdmissionControl
from noria.scheduling.step.predictor import CompletionPredictor
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, FinishReason, ItemId, SchedulableRequest

MODEL = ModelKey("m")

SMALL = BatchKey(64, 64, MODEL)
NOW = 1000.0  # no time is from the start of the clock


def make_request(name, calls=5, images=1, **more):
    return SchedulableRequest(name, SMALL, images, calls, None, **more)


def make_admission(num_slots=2, queue_limit_s=float("inf")):
    """A call takes a second for each row."""
    costs = CostModel(8, {SMALL: CostCurve({1: 1.0, 8: 8.0})})
    table = RequestTable(num_slots)
    predictor = CompletionPredictor(table, costs, least_slack, num_slots, 4)
    return AdmissionControl(table, predictor, 256, queue_limit_s)


def test_the_learned_correction_applies_to_predictions_and_not_to_admission():
    admission = make_admission()
    predictor, active = admission.predictor, admission.table.add(make_request("a", deadline=NOW + 4.0), NOW)
    active.promised_forecast = predictor.predict_uncorrected("a", NOW)
    for _ in range(200):
        predictor.record_finished(active, 2.5)
    assert predictor.predict_requests(["a"], NOW)["a"].finish_in_s == pytest.approx(2.5, rel=0.01)
    rejected = admission.reject_for_deadline(active.request, [], NOW)
    assert "it would finish in 5.00 s, its deadline is in 4.00 s" in rejected.message


def test_a_deadline_behind_the_simulated_head_is_not_broken():
    """The last of 200 requests can be delayed by one more ahead of it, and not by two."""
    admission = make_admission()
    for number in range(199):
        admission.table.add(make_request(f"r{number}", priority="high"), NOW)
    deadline = NOW + admission.predictor.predict_uncorrected("r198", NOW).finish_in_s + 2.7 * 5
    admission.table.add(make_request("last", deadline=deadline), NOW)
    first, second = (admission.table.add(make_request(name, priority="high"), NOW) for name in ("first", "second"))
    assert admission.deadlines_broken_by(second, NOW) == ["last"]
    admission.table.remove("second")
    assert admission.deadlines_broken_by(first, NOW) == []


def test_a_deadline_that_can_be_met_is_not_rejected():
    admission = make_admission()
    newcomer = admission.table.add(make_request("a", deadline=NOW + 5.0), NOW)
    late_ids = admission.deadlines_broken_by(newcomer, NOW)
    assert (late_ids, admission.reject_for_deadline(newcomer.request, late_ids, NOW)) == ([], None)


def test_a_request_too_long_for_its_deadline_has_no_retry_after():
    """On an idle server its four images take longer than its deadline allows: a retry cannot succeed."""
    admission = make_admission()
    newcomer = admission.table.add(make_request("a", images=4, deadline=NOW + 15.0), NOW)
    rejected = admission.reject_for_deadline(newcomer.request, [], NOW)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.UNMEETABLE, None)
    assert "even on an idle server it takes 20.00 s" in rejected.message


def test_a_deadline_that_others_delay_can_be_met_later():
    """Its five calls take 15 s beside two images of others: 3 s too long, and then it is not kept."""
    admission = make_admission(num_slots=3)
    admission.admit(make_request("others", images=2, priority="high"), NOW, NOW)
    rejected = admission.admit(make_request("a", deadline=NOW + 12.0), NOW, NOW)
    assert (rejected.finish_reason, rejected.retry_after_s) == (FinishReason.UNMEETABLE, pytest.approx(3.0))
    assert rejected.message == "it would finish in 15.00 s, its deadline is in 12.00 s"
    assert list(admission.table.requests) == ["others"]
    assert admission.admit(make_request("b", deadline=NOW + 15.5), NOW, NOW) is None
    assert admission.table.requests["b"].promised_forecast.finish_in_s == pytest.approx(15.0)


def test_a_deadline_missed_anyway_is_not_broken_by_a_new_request():
    admission = make_admission(num_slots=4)
    admission.table.add(make_request("hopeless", deadline=NOW + 2.0), NOW)
    newcomer = admission.table.add(make_request("a", deadline=NOW + 40.0), NOW)
    assert admission.deadlines_broken_by(newcomer, NOW) == []


def test_a_deadline_missed_by_less_than_the_cost_uncertainty_can_be_broken():
    admission = make_admission(num_slots=4)
    admission.table.add(make_request("close", deadline=NOW + 4.9), NOW)
    newcomer = admission.table.add(make_request("a", deadline=NOW + 40.0), NOW)
    assert admission.deadlines_broken_by(newcomer, NOW) == ["close"]


def test_finding_broken_deadlines_changes_nothing():
    admission = make_admission(num_slots=4)
    predictor, table = admission.predictor, admission.table
    table.add(make_request("close", deadline=NOW + 4.9), NOW)
    newcomer = table.add(make_request("a", deadline=NOW + 40.0), NOW)
    names = ["close", "a"]
    before = predictor.predict_requests(names, NOW), [each.image for each in table.queue], list(table.requests)
    admission.deadlines_broken_by(newcomer, NOW)
    assert before == (
        predictor.predict_requests(names, NOW),
        [each.image for each in table.queue],
        list(table.requests),
    )


def test_a_deprioritized_request_goes_behind_the_deadlines_it_would_break_and_no_further():
    admission = make_admission()
    table = admission.table
    table.add(make_request("accepted", deadline=NOW + 20.0), NOW)
    table.add(make_request("accepted, far deadline", deadline=NOW + 300.0), NOW)
    newcomer = table.add(make_request("high", priority="high"), NOW)
    table.add(make_request("low", priority="low"), NOW)
    admission.deprioritize(newcomer, ["accepted"], NOW)
    order = [each.image.attempt_id for each in admission.predictor.queue(NOW)]
    assert order == ["accepted", "high", "accepted, far deadline", "low"]


def test_images_that_are_paused_in_slots_count_in_the_backlog():
    """However many slots are free: a call has room for 8 images, and they have 40 s of work."""
    admission = make_admission(num_slots=512, queue_limit_s=30.0)
    for number in range(8):
        assert admission.reject_for_backlog(make_request("next")) is None
        admission.table.add(make_request(f"r{number}"), NOW)
        admission.table.assign(ItemId(f"r{number}", 0), NOW)
    message = admission.reject_for_backlog(make_request("next")).message
    assert "it holds 40.00 s of work, the limit is 30 s" in message


@pytest.mark.parametrize(("num_running", "most"), [(0, 2), (1, 2), (2, 2)])
def test_as_many_images_as_the_limit_and_the_free_slots_take_are_accepted(num_running, most):
    admission = make_admission(num_slots=2)
    admission.queue_limit = 3
    admission.table.add(make_request("a", images=3), NOW)
    for index in range(num_running):
        admission.table.assign(ItemId("a", index), NOW)
    assert admission.reject_for_queue_length(make_request("b", images=most)) is None
    rejected = admission.reject_for_queue_length(make_request("b", images=most + 1))
    assert f"{3 - num_running} images are waiting, the limit is 3, and this request has {most + 1}" in rejected.message
    assert rejected.retry_after_s == pytest.approx(15.0 / 3)  # until one of the three has left


def test_a_queue_without_a_limit_in_seconds_is_never_rejected_for_its_backlog():
    unlimited, limited = make_admission(), make_admission(queue_limit_s=10.0)
    for admission in (unlimited, limited):
        admission.table.add(make_request("a", calls=10**6), NOW)
    assert unlimited.reject_for_backlog(make_request("b")) is None
    assert limited.reject_for_backlog(make_request("b")).finish_reason is FinishReason.REJECTED
