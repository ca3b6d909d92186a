"""A wheel on virtual time with a fake device, and those who follow it."""

import itertools
import math

import pytest

from noria.engine.cells import packed
from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.loop import Wheel
from noria.engine.showing import BETWEEN_VIEWS_S, MOST_BETWEEN_VIEWS_S, MOST_KEPT, MOST_WAITING, Showing
from noria.messages import Follow
from noria.request import ImageRequest, flight_id, request_id_of
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import ShapeClass
from noria.scheduling.policies import fcfs
from noria.scheduling.steps import StepScheduler

UNIX = 1_700_000_000.0  # at which the virtual clock began


def wish(name="a", steps=3, images=1, side_px=8, **options):
    return ImageRequest(
        flight_id(name, "f00d"), "p", "", 7, side_px, side_px, steps, 2.0, images, "ddim", math.inf, **options
    )


class World:
    """An engine's wheel without its threads."""

    def __init__(self, slots=4, turn_s=0.05, costs=None, **limits):
        self.clock, self.turn_s = VirtualClock(), turn_s
        self.executor = FakeExecutor(self.clock, lambda _plan: turn_s)
        self.scheduler = StepScheduler(slots, costs=costs or CostModel(), **limits)
        self.wheel = Wheel(self.scheduler, self.executor, self.happened, self.clock, self.about_to)
        self.showing = Showing("life", self.scheduler, self.wheel.request, self.clock())
        self.num_glimpsed, self.boarded = 0, []

    def happened(self, event):
        self.showing.happened(event, self.clock())

    def about_to(self, plan):
        glimpse = self.showing.about_to(plan, self.clock())
        self.num_glimpsed += glimpse
        self.boarded += [request_id_of(seat.image.request_id) for seat in plan.boards]
        return glimpse

    def submit(self, *wishes):
        for each in wishes:
            self.wheel.submit(self.executor.prepare(each))

    def turn(self):
        """One turn, or as long a wait where there is nothing to do; and the views after it."""
        turn = self.wheel.turn()
        if turn is None:
            self.clock.now += self.turn_s
        else:
            self.showing.turned(turn, self.clock(), UNIX + self.clock())
        return self.views()

    def views(self):
        return [(who, *packed(shown)) for who, shown in self.showing.views(self.clock(), UNIX + self.clock())]

    def follow(self, who="me", seen=None, *, pictures=False):
        self.showing.follow(who, Follow(seen, pictures))

    def watch(self, turns, who="me", *, pictures=False):
        """All that `who` sees, asking again after each view."""
        seen, views = None, []
        self.follow(who, seen, pictures=pictures)
        for happen in turns:
            happen()
            for whose, view, pixels in self.turn():
                if whose == who:
                    views.append((view, pixels))
                    self.follow(who, view.number, pictures=pictures)
        return views


def test_who_has_seen_none_is_shown_the_wheel_at_once():
    world = World()
    world.follow()
    assert world.showing.wait_s(world.clock()) == 0.0
    ((who, view, pixels),) = world.views()
    assert (who, view.number, view.seats, view.turns, pixels) == ("me", 0, (), (), None)
    assert (view.incarnation, view.num_slots, view.at) == ("life", 4, UNIX)


def test_a_follow_is_answered_once_and_not_before_there_is_something_new():
    world = World()
    world.follow()
    assert len(world.views()) == 1
    assert world.views() == []
    world.follow(seen=0)
    world.clock.now += 10
    assert world.views() == []
    assert world.showing.wait_s(world.clock()) is None  # idle for ever
    world.submit(wish())
    assert [view.num_waiting for _, view, _ in world.views()] == [1]
    assert world.views() == []


def test_asking_anew_before_the_answer_is_answered_once():
    world = World()
    for _ in range(3):
        world.follow()
    assert len(world.views()) == 1


def test_a_seat_says_who_sits_there_how_far_he_is_and_until_when():
    costs = CostModel()
    costs.observe_step(ShapeClass(8, 8, "m"), 2, 0.05)
    world = World(costs=costs)
    world.submit(wish("a", steps=10, images=2, model="m", deadline_s=60.0, priority="high"))
    world.turn()
    world.turn()
    world.follow()
    ((_, view, _),) = world.views()
    first, second = view.seats
    assert (first.slot, first.request_id, first.index, first.model) == (0, "a", 0, "m")
    assert (second.slot, second.index) == (1, 1)
    assert (first.width_px, first.scheduler, first.guidance_scale, first.priority) == (8, "ddim", 2.0, "high")
    assert (first.num_steps, first.call, first.num_calls) == (10, 2, 10)
    assert (first.boarded_at, first.due_at) == (UNIX, UNIX + 60)
    assert UNIX + world.clock() + 8 * 0.04 < first.finish_at < UNIX + world.clock() + 8 * 0.2


def test_the_first_of_those_who_wait_are_shown_in_the_order_in_which_they_board():
    world = World(slots=2, policy=fcfs)
    world.submit(wish("seated", steps=9, images=3), *(wish(f"w{k:02}", steps=2) for k in range(MOST_WAITING + 5)))
    world.turn()
    world.follow()
    ((_, view, _),) = world.views()
    assert view.num_waiting == MOST_WAITING + 6
    assert len(view.waiting) == MOST_WAITING
    boards = [each.request_id for each in view.waiting]
    by_name = {each.request_id: each for each in view.waiting}
    assert by_name["seated"].num_images == 1
    assert all(each.arrived_at == UNIX for each in view.waiting)
    world.boarded.clear()
    while len(world.boarded) < 20:
        world.turn()
    assert list(dict.fromkeys(world.boarded)) == boards[: len(dict.fromkeys(world.boarded))]


def test_every_turn_boarding_and_leaving_is_seen_exactly_once():
    world = World(slots=4, turn_s=0.07)
    wishes = {n: wish(f"r{n}", steps=2 + n % 5, images=1 + n % 3) for n in range(0, 60, 2)}

    def happening(turn):
        def happen():
            if turn in wishes:
                world.submit(wishes[turn])
            if turn == 31:
                world.wheel.cancel(flight_id("r30", "f00d"))

        return happen

    views = [view for view, _ in world.watch([happening(turn) for turn in range(400)])]
    turns = [turn for view in views for turn in view.turns]
    assert [turn.number for turn in turns] == list(range(1, views[-1].number + 1))
    left = [each for view in views for each in view.left]
    images = {(f"r{n}", index) for n, each in wishes.items() for index in range(each.num_images)}
    assert {(each.request_id, each.index) for each in left} <= images
    assert len(left) == len({(each.request_id, each.index) for each in left})
    assert sum(turn.num_boarded for turn in turns) == len(left)
    assert {each.outcome for each in left if each.request_id == "r30"} <= {"cancelled", "ok"}
    assert {(each.request_id, each.index) for each in left if each.outcome == "ok"} >= {
        image for image in images if image[0] != "r30"
    }
    seated, at = set(), {turn.number: turn for turn in turns}
    for view in views:
        here = {(seat.request_id, seat.index) for seat in view.seats}
        gone = {(each.request_id, each.index) for each in view.left}
        assert seated - here <= gone  # nobody vanishes
        assert all(each.number in at for each in view.left)
        seated = here


def test_who_leaves_without_a_turn_is_seen_to_leave():
    world = World()
    world.submit(wish("gone", steps=50))
    views = []
    for view, _ in world.watch([lambda: None] * 5):
        views.append(view)
    world.wheel.cancel(flight_id("gone", "f00d"))
    world.clock.now += 1
    assert world.showing.wait_s(world.clock()) == 0.0
    ((_, view, _),) = world.views()
    assert view.seats == ()
    assert [(each.request_id, each.slot, each.outcome, each.number) for each in view.left] == [
        ("gone", 0, "cancelled", view.number)
    ]


def test_a_follower_gets_five_views_a_second_and_one_that_is_late_all_turns_between():
    world = World(turn_s=0.01)
    world.submit(wish(steps=500))
    views = [view for view, _ in world.watch([lambda: None] * 500)]
    assert 5.0 / BETWEEN_VIEWS_S - 2 <= len(views) <= 5.0 / BETWEEN_VIEWS_S + 2
    assert [turn.number for turn in views[5].turns] == list(range(views[4].number + 1, views[5].number + 1))


@pytest.mark.parametrize(("took_s", "between_s"), [(0.001, BETWEEN_VIEWS_S), (0.005, 0.5), (3.0, MOST_BETWEEN_VIEWS_S)])
def test_views_that_take_long_are_few(took_s, between_s):
    world = World(turn_s=0.01)
    world.submit(wish(steps=500))
    world.follow()
    ((_, view, _),) = world.turn()
    shown = []
    for _ in range(400):
        world.follow(seen=view.number)
        if world.turn():
            shown.append(world.clock())
            world.showing.took(took_s)
    between = [later - earlier for earlier, later in itertools.pairwise(shown)]
    assert len(between) >= 3
    assert between == pytest.approx([between_s] * len(between), abs=0.011)  # a turn


def test_newcomers_hold_nobody_up_and_take_no_more_of_the_wheels_time():
    world = World(turn_s=0.01)
    world.submit(wish(steps=500))
    took_s, answers, mine, seen = 0.005, 0, [], None
    for _ in range(400):
        world.follow("me", seen)
        world.follow(f"newcomer {len(mine)}")  # who leaves, and comes again, before each turn
        views = world.turn()
        if views:
            answers += 1
            world.showing.took(took_s)
        for who, view, _ in views:
            if who == "me":
                seen = view.number
                mine.append(view)
    assert answers <= 4.0 / 0.5 + 1  # a hundredth of the time
    assert len(mine) == answers


def test_what_is_kept_is_bounded():
    world = World(slots=4)
    for k in range(MOST_KEPT):
        world.submit(wish(f"r{k}", steps=1), wish(f"s{k}", steps=1))
        world.turn()
    world.submit(wish("last", steps=MOST_KEPT))
    for _ in range(MOST_KEPT):
        world.turn()
    world.follow()
    ((_, view, _),) = world.views()
    assert [turn.number for turn in view.turns] == list(range(MOST_KEPT + 1, 2 * MOST_KEPT + 1))
    assert view.left == ()  # they were gone before it came
    assert len(world.showing._left) == MOST_KEPT
    assert len(world.showing._places) == 0


def test_without_a_follower_of_pictures_no_turn_has_glimpses():
    world = World()
    world.submit(wish(steps=20))
    views = world.watch([lambda: None] * 20)
    assert world.num_glimpsed == 0
    assert all(pixels is None and view.cells == () for view, pixels in views)


def test_every_seated_image_has_a_cell_once_it_was_seen_and_few_turns_are():
    world = World(turn_s=0.01)
    world.submit(wish("a", steps=200, images=2), wish("b", steps=200))
    views = world.watch([lambda: None] * 200, pictures=True)
    for view, pixels in views[1:]:
        assert [(cell.request_id, cell.index, cell.slot, cell.offset) for cell in view.cells] == [
            (seat.request_id, seat.index, seat.slot, 3 * number) for number, seat in enumerate(view.seats)
        ]
        assert pixels == bytes([7] * 3 + [8] * 3 + [7] * 3)
    assert world.num_glimpsed <= len(views) + 1


@pytest.mark.parametrize("turn_s", [0.01, 2 * MOST_BETWEEN_VIEWS_S])
def test_for_who_was_shown_pictures_and_asks_no_more_one_turn_has_glimpses(turn_s):
    world = World(turn_s=turn_s)
    world.submit(wish(steps=100))
    world.watch([lambda: None] * 30, pictures=True)
    while not world.turn():  # the last answer
        pass
    before = world.num_glimpsed
    for _ in range(60):
        assert world.turn() == []
    assert world.num_glimpsed - before <= 1


def test_two_shapes_that_take_turns_are_both_seen():
    world = World(slots=4, turn_s=BETWEEN_VIEWS_S / 2)
    world.submit(wish("a", steps=60), wish("b", steps=60, side_px=16))
    views = world.watch([lambda: None] * 60, pictures=True)
    assert len(views) > 20
    for view, _ in views[4:]:
        assert {cell.request_id for cell in view.cells} == {"a", "b"}


def test_images_that_are_paused_keep_their_last_picture_until_they_leave():
    world = World(slots=2, turn_s=0.3)
    world.submit(wish("long", steps=40), wish("short", steps=2, side_px=16))
    views = world.watch([lambda: None] * 30, pictures=True)
    with_short = [view for view, _ in views if any(seat.request_id == "short" for seat in view.seats)]
    assert any(len(view.cells) == 2 for view in with_short)
    last = views[-1][0]
    assert [seat.request_id for seat in last.seats] == ["long"] == [cell.request_id for cell in last.cells]


def test_who_makes_no_step_for_a_second_as_others_go_first_is_paused_until_he_steps():
    world = World(slots=8, turn_s=0.3)
    world.submit(wish("one", steps=40), wish("many", steps=40, images=7, side_px=16))
    views = [view for view, _ in world.watch([lambda: None] * 40)]
    ones = [seat for view in views for seat in view.seats if seat.request_id == "one"]
    assert {seat.paused for seat in ones} == {True, False}
    for before, after in itertools.pairwise(ones):
        assert not (after.paused and after.call > before.call), "he has just stepped"
    assert not any(seat.paused for view in views for seat in view.seats if seat.request_id == "many")


def test_two_sizes_that_take_turns_do_not_blink():
    world = World(slots=4, turn_s=0.1)
    world.submit(wish("a", steps=60), wish("b", steps=60, side_px=16))
    views = [view for view, _ in world.watch([lambda: None] * 60)]
    assert not any(seat.paused for view in views for seat in view.seats)


def test_a_long_turn_of_another_size_pauses_nobody():
    world = World(slots=4, turn_s=3.0)
    world.submit(wish("a", steps=20), wish("b", steps=20, side_px=16))
    views = [view for view, _ in world.watch([lambda: None] * 30)]
    assert not any(seat.paused for view in views[10:] for seat in view.seats)  # before, what turns cost is found out


def test_what_did_not_fit_the_memory_has_not_boarded():
    world = World(slots=8)
    world.executor.memory = {"boards": 3}
    world.submit(*(wish(f"r{k}", steps=3) for k in range(8)))
    views = [view for view, _ in world.watch([lambda: None] * 40)]
    turns = [turn for view in views for turn in view.turns]
    assert turns[0].num_boarded == 0 == turns[0].num_stepped
    assert sum(turn.num_boarded for turn in turns) == 8 == sum(len(view.left) for view in views)


def test_rates_go_on_while_nothing_turns_and_then_there_is_silence():
    world = World()
    world.submit(wish(steps=2))
    views = world.watch([lambda: None] * 4)
    while (wait_s := world.showing.wait_s(world.clock())) is not None:
        world.clock.now += wait_s
        ((_, view, _),) = world.views()
        views.append((view, None))
        world.follow(seen=view.number)
    rates = [view.rates for view, _ in views]
    assert rates[-1].requests_per_s == 0 == rates[-1].busy
    assert max(each.requests_per_s for each in rates) > 0
    assert 55 <= len(rates) <= 70
    assert next(each.p50_s for each in reversed(rates) if each.p50_s) == pytest.approx(0.1)


def test_who_is_gone_is_forgotten():
    world = World()
    world.follow("me")
    world.follow("other")
    world.showing.leave("me")
    assert [who for who, _, _ in world.views()] == ["other"]
