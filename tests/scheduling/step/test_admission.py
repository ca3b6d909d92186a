"""Promises and refusals: what is expected of the crowd."""

import pytest

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import least_slack
from noria.scheduling.step.admission import CompletionPredictor
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, FinishReason, ImageId, SchedulableRequest

SMALL, LARGE = BatchKey(64, 64, "m"), BatchKey(128, 64, "m")


def make_request(name, calls=5, images=1, batch_key=SMALL, **more):
    return SchedulableRequest(name, batch_key, images, calls, None, **more)


def make_predictor(num_slots=2, max_rows=8, policy=least_slack):
    """A second for every row of a call."""
    costs = CostModel(max_rows, {batch_key: CostCurve({1: 1.0, 8: 8.0}) for batch_key in (SMALL, LARGE)})
    return CompletionPredictor(RequestTable(num_slots), costs, policy, num_slots, 4)


def test_a_request_starts_with_its_first_image_and_is_done_with_its_last():
    predictor = make_predictor()
    predictor.table.add(make_request("a", images=3), 0.0)
    at = predictor.predict_requests(0.0)["a"]
    assert (at.start_in_s, at.finish_in_s) == (0.0, 15.0)


def test_what_was_foreseen_holds_until_something_changes():
    predictor = make_predictor()
    predictor.table.add(make_request("a"), 0.0)
    assert predictor.predict_uncorrected(0.0) is predictor.predict_uncorrected(1.0)
    predictor.table.assign(ImageId("a", 0), 1.0)
    predictor.table.record_step(ImageId("a", 0), 1, 1)
    assert predictor.predict_requests(1.0)["a"].finish_in_s == 4.0


def test_places_count_who_boards_before():
    predictor = make_predictor()
    predictor.table.add(make_request("a", images=2), 0.0)
    predictor.table.add(make_request("urgent", due=20.0), 0.0)
    assert predictor.queue_positions(0.0) == {ImageId("urgent", 0): 0, ImageId("a", 0): 1, ImageId("a", 1): 2}


def test_the_usual_company_is_learned_over_turns_and_fades_when_nobody_is_here():
    predictor = make_predictor()
    for iteration in range(300):
        predictor.record_iteration(SMALL, 6, 0.1, now=0.1 * iteration)
    predictor.table.add(make_request("a", calls=2), 0.0)
    assert predictor.predict_requests(30.0)["a"].finish_in_s == 12.0
    predictor.table.remove("a")
    predictor.decay(29.9 + 3.0)  # thirty turns later
    predictor.table.add(make_request("a", calls=2), 0.0)
    assert predictor.predict_requests(33.0)["a"].finish_in_s == 4.0  # 6 / e rows


def test_standing_still_is_counted_once_however_often_it_is_noted():
    one, other = make_predictor(), make_predictor()
    for predictor in (one, other):
        predictor.record_iteration(SMALL, 300, 0.1, now=0.0)
    one.decay(3.0)
    for now in (1.0, 2.0, 3.0):
        other.decay(now)
    for predictor in (one, other):
        predictor.table.add(make_request("a"), 3.0)
    assert one.predict_requests(3.0) == other.predict_requests(3.0)


def test_before_the_first_turn_there_is_nothing_to_fade():
    predictor = make_predictor()
    predictor.decay(5.0)
    predictor.table.add(make_request("a"), 5.0)
    assert predictor.predict_requests(5.0)["a"].finish_in_s == 5.0


def test_company_of_a_class_that_nobody_has_seated_is_forgotten_while_others_turn():
    predictor = make_predictor()
    predictor.record_iteration(LARGE, 240, 0.1, now=0.0)
    predictor.table.add(make_request("here", batch_key=SMALL), 0.0)
    predictor.table.assign(ImageId("here", 0), 0.0)
    for iteration in range(300):
        predictor.record_iteration(SMALL, 1, 0.1, now=0.1 * iteration)
    predictor.table.remove("here")
    predictor.table.add(make_request("late", batch_key=LARGE, calls=2), 30.0)
    assert predictor.predict_requests(30.0)["late"].finish_in_s == 2.0


def test_promises_that_were_too_short_make_the_next_ones_longer():
    predictor = make_predictor()
    active = predictor.table.add(make_request("a"), 0.0)
    predictor.record_finished(active, 7.5)  # nothing was promised
    active.promised_forecast = predictor.predict_uncorrected(0.0)["a"]
    for _ in range(200):
        predictor.record_finished(active, 7.5)
    assert predictor.predict_requests(0.0)["a"].finish_in_s == pytest.approx(7.5, rel=0.01)


def test_that_others_were_done_early_shortens_what_is_shown_and_not_what_is_promised():
    predictor = make_predictor()
    active = predictor.table.add(make_request("a", due=4.0), 0.0)
    active.promised_forecast = predictor.predict_uncorrected(0.0)["a"]
    for _ in range(200):
        predictor.record_finished(active, 2.5)
    assert predictor.predict_requests(0.0)["a"].finish_in_s == pytest.approx(2.5, rel=0.01)
    refused = predictor.refuse_for_deadline(active.request, [], 0.0)
    assert "it would be done in 5.00 s, 4.00 s are left" in refused.message


def test_who_has_a_deadline_that_nothing_forbids_is_not_refused():
    predictor = make_predictor()
    newcomer = predictor.table.add(make_request("a", due=5.0), 0.0)
    late_ids = predictor.deadlines_broken_by(newcomer, 0.0)
    assert (late_ids, predictor.refuse_for_deadline(newcomer.request, late_ids, 0.0)) == ([], None)


def test_many_images_are_told_what_they_all_take_alone():
    """So that nobody is told to come back for what can never be."""
    predictor = make_predictor()
    newcomer = predictor.table.add(make_request("a", images=4, due=15.0), 0.0)
    refused = predictor.refuse_for_deadline(newcomer.request, [], 0.0)
    assert (refused.finish_reason, refused.retry_after_s) == (FinishReason.UNMEETABLE, None)
    assert "even with nobody else here it takes 20.00 s" in refused.message


def test_who_was_late_anyway_does_not_keep_others_out():
    predictor = make_predictor(num_slots=4)
    predictor.table.add(make_request("hopeless", due=2.0), 0.0)
    newcomer = predictor.table.add(make_request("a", due=40.0), 0.0)
    assert predictor.deadlines_broken_by(newcomer, 0.0) == []


def test_who_was_late_only_by_as_much_as_costs_are_in_doubt_is_still_kept_from_worse():
    predictor = make_predictor(num_slots=4)
    predictor.table.add(make_request("close", due=4.9), 0.0)
    newcomer = predictor.table.add(make_request("a", due=40.0), 0.0)
    assert predictor.deadlines_broken_by(newcomer, 0.0) == ["close"]


def test_looking_back_for_who_was_late_before_changes_nothing():
    predictor = make_predictor(num_slots=4)
    predictor.table.add(make_request("close", due=4.9), 0.0)
    newcomer = predictor.table.add(make_request("a", due=40.0), 0.0)
    before = predictor.predict_requests(0.0), list(predictor.table.waiting), list(predictor.table.requests)
    predictor.deadlines_broken_by(newcomer, 0.0)
    assert before == (predictor.predict_requests(0.0), list(predictor.table.waiting), list(predictor.table.requests))


def test_who_is_put_behind_goes_after_those_it_would_make_late_and_no_further():
    predictor = make_predictor()
    predictor.table.add(make_request("promised", due=20.0), 0.0)
    predictor.table.add(make_request("promised long ago", due=300.0), 0.0)
    newcomer = predictor.table.add(make_request("high", priority="high"), 0.0)
    predictor.table.add(make_request("low", priority="low"), 0.0)
    predictor.deprioritize(newcomer, ["promised"], 0.0)
    order = [image.request_id for image in predictor.sort_by_policy(list(predictor.table.waiting), 0.0)]
    assert order == ["promised", "high", "promised long ago", "low"]


def test_a_queue_without_a_limit_in_seconds_refuses_nobody_for_length():
    predictor = make_predictor()
    predictor.table.add(make_request("a", calls=10**6), 0.0)
    assert predictor.refuse_for_backlog(make_request("b"), float("inf")) is None
    assert predictor.refuse_for_backlog(make_request("b"), 10.0).finish_reason is FinishReason.REFUSED
