"""Promises and refusals: what is expected of the crowd."""

import pytest

from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.crowd import Crowd
from noria.scheduling.outlook import Outlook
from noria.scheduling.plans import End, ImageId, ShapeClass, Ticket
from noria.scheduling.policies import least_slack

SMALL, LARGE = ShapeClass(64, 64, "m"), ShapeClass(128, 64, "m")


def ticket(name, calls=5, images=1, shape=SMALL, **more):
    return Ticket(name, shape, images, calls, None, **more)


def outlook(slots=2, most_rows=8, policy=least_slack):
    """A second for every row of a call."""
    costs = CostModel(most_rows, {shape: Curve({1: 1.0, 8: 8.0}) for shape in (SMALL, LARGE)})
    return Outlook(Crowd(slots), costs, policy, slots, 4)


def test_a_request_starts_with_its_first_image_and_is_done_with_its_last():
    seen = outlook()
    seen.crowd.enter(ticket("a", images=3), 0.0)
    at = seen.requests(0.0)["a"]
    assert (at.start_in_s, at.finish_in_s) == (0.0, 15.0)


def test_what_was_foreseen_holds_until_something_changes():
    seen = outlook()
    seen.crowd.enter(ticket("a"), 0.0)
    assert seen.uncorrected(0.0) is seen.uncorrected(1.0)
    seen.crowd.seat(ImageId("a", 0), 1.0)
    seen.crowd.stepped(ImageId("a", 0), 1, 1)
    assert seen.requests(1.0)["a"].finish_in_s == 4.0


def test_places_count_who_boards_before():
    seen = outlook()
    seen.crowd.enter(ticket("a", images=2), 0.0)
    seen.crowd.enter(ticket("urgent", due=20.0), 0.0)
    assert seen.places(0.0) == {ImageId("urgent", 0): 0, ImageId("a", 0): 1, ImageId("a", 1): 2}


def test_the_usual_company_is_learned_over_turns_and_fades_when_nobody_is_here():
    seen = outlook()
    for turn in range(300):
        seen.stepped(SMALL, 6, 0.1, now=0.1 * turn)
    seen.crowd.enter(ticket("a", calls=2), 0.0)
    assert seen.requests(30.0)["a"].finish_in_s == 12.0
    seen.crowd.leave("a")
    seen.stood_still(29.9 + 3.0)  # thirty turns later
    seen.crowd.enter(ticket("a", calls=2), 0.0)
    assert seen.requests(33.0)["a"].finish_in_s == 4.0  # 6 / e rows


def test_standing_still_is_counted_once_however_often_it_is_noted():
    one, other = outlook(), outlook()
    for seen in (one, other):
        seen.stepped(SMALL, 300, 0.1, now=0.0)
    one.stood_still(3.0)
    for now in (1.0, 2.0, 3.0):
        other.stood_still(now)
    for seen in (one, other):
        seen.crowd.enter(ticket("a"), 3.0)
    assert one.requests(3.0) == other.requests(3.0)


def test_before_the_first_turn_there_is_nothing_to_fade():
    seen = outlook()
    seen.stood_still(5.0)
    seen.crowd.enter(ticket("a"), 5.0)
    assert seen.requests(5.0)["a"].finish_in_s == 5.0


def test_company_of_a_class_that_nobody_has_seated_is_forgotten_while_others_turn():
    seen = outlook()
    seen.stepped(LARGE, 240, 0.1, now=0.0)
    seen.crowd.enter(ticket("here", shape=SMALL), 0.0)
    seen.crowd.seat(ImageId("here", 0), 0.0)
    for turn in range(300):
        seen.stepped(SMALL, 1, 0.1, now=0.1 * turn)
    seen.crowd.leave("here")
    seen.crowd.enter(ticket("late", shape=LARGE, calls=2), 30.0)
    assert seen.requests(30.0)["late"].finish_in_s == 2.0


def test_promises_that_were_too_short_make_the_next_ones_longer():
    seen = outlook()
    accepted = seen.crowd.enter(ticket("a"), 0.0)
    seen.finished(accepted, 7.5)  # nothing was promised
    accepted.promised = seen.uncorrected(0.0)["a"]
    for _ in range(200):
        seen.finished(accepted, 7.5)
    assert seen.requests(0.0)["a"].finish_in_s == pytest.approx(7.5, rel=0.01)


def test_that_others_were_done_early_shortens_what_is_shown_and_not_what_is_promised():
    seen = outlook()
    accepted = seen.crowd.enter(ticket("a", due=4.0), 0.0)
    accepted.promised = seen.uncorrected(0.0)["a"]
    for _ in range(200):
        seen.finished(accepted, 2.5)
    assert seen.requests(0.0)["a"].finish_in_s == pytest.approx(2.5, rel=0.01)
    refused = seen.refuse_for_deadline(accepted.ticket, [], 0.0)
    assert "it would be done in 5.00 s, 4.00 s are left" in refused.reason


def test_who_has_a_deadline_that_nothing_forbids_is_not_refused():
    seen = outlook()
    newcomer = seen.crowd.enter(ticket("a", due=5.0), 0.0)
    late = seen.made_late_by(newcomer, 0.0)
    assert (late, seen.refuse_for_deadline(newcomer.ticket, late, 0.0)) == ([], None)


def test_many_images_are_told_what_they_all_take_alone():
    """So that nobody is told to come back for what can never be."""
    seen = outlook()
    newcomer = seen.crowd.enter(ticket("a", images=4, due=15.0), 0.0)
    refused = seen.refuse_for_deadline(newcomer.ticket, [], 0.0)
    assert (refused.end, refused.retry_after_s) == (End.UNMEETABLE, None)
    assert "even with nobody else here it takes 20.00 s" in refused.reason


def test_who_was_late_anyway_does_not_keep_others_out():
    seen = outlook(slots=4)
    seen.crowd.enter(ticket("hopeless", due=2.0), 0.0)
    newcomer = seen.crowd.enter(ticket("a", due=40.0), 0.0)
    assert seen.made_late_by(newcomer, 0.0) == []


def test_who_was_late_only_by_as_much_as_costs_are_in_doubt_is_still_kept_from_worse():
    seen = outlook(slots=4)
    seen.crowd.enter(ticket("close", due=4.9), 0.0)
    newcomer = seen.crowd.enter(ticket("a", due=40.0), 0.0)
    assert seen.made_late_by(newcomer, 0.0) == ["close"]


def test_looking_back_for_who_was_late_before_changes_nothing():
    seen = outlook(slots=4)
    seen.crowd.enter(ticket("close", due=4.9), 0.0)
    newcomer = seen.crowd.enter(ticket("a", due=40.0), 0.0)
    before = seen.requests(0.0), list(seen.crowd.waiting), list(seen.crowd.requests)
    seen.made_late_by(newcomer, 0.0)
    assert before == (seen.requests(0.0), list(seen.crowd.waiting), list(seen.crowd.requests))


def test_who_is_put_behind_goes_after_those_it_would_make_late_and_no_further():
    seen = outlook()
    seen.crowd.enter(ticket("promised", due=20.0), 0.0)
    seen.crowd.enter(ticket("promised long ago", due=300.0), 0.0)
    newcomer = seen.crowd.enter(ticket("high", priority="high"), 0.0)
    seen.crowd.enter(ticket("low", priority="low"), 0.0)
    seen.put_behind(newcomer, ["promised"], 0.0)
    order = [image.request_id for image in seen.in_order(list(seen.crowd.waiting), 0.0)]
    assert order == ["promised", "high", "promised long ago", "low"]


def test_a_queue_without_a_limit_in_seconds_refuses_nobody_for_length():
    seen = outlook()
    seen.crowd.enter(ticket("a", calls=10**6), 0.0)
    assert seen.refuse_for_length(ticket("b"), float("inf")) is None
    assert seen.refuse_for_length(ticket("b"), 10.0).end is End.REFUSED
