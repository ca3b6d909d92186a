"""Live views of an engine loop with a fake device, on virtual time."""

import itertools

import pytest

from noria.engine.live.pending_view import resolve_view
from noria.engine.live.publisher import MAX_KEPT, MAX_VIEW_INTERVAL_S, MAX_WAITING, VIEW_INTERVAL_S
from noria.engine.live.shares import MAX_SHARES
from noria.engine.live.step_publisher import StepLiveView
from noria.engine.loop import StepLoop
from noria.protocol.diffusion import Control, ImageSettingsView, Reference, Refinement
from noria.protocol.live_views import CallSizeView
from noria.protocol.messages import ViewRequest
from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import fcfs
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey
from noria.testing.fake_executor import FakeExecutor, FakePreparedRequest
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import START, VirtualClock

MODEL = ModelKey("m")

UNIX = 1_700_000_000.0 - START  # when the virtual clock was 0


class MixedRequest(FakePreparedRequest):
    """A request of a model that mixes sizes in a call."""

    @property
    def call_size(self):
        """The same for all sizes."""
        return (0, 0)


def make_request(name="a", steps=3, images=1, side_px=8, **options):
    settings = {"width": side_px, "height": side_px, "inference_steps": steps, "n": images}
    return make_image_request(name, attempt_id=f"{name}.f00d", **settings, **options)


class Harness:
    """An engine's loop and live view without its threads."""

    def __init__(self, slots=4, iteration_s=0.05, costs=None, **limits):
        self.clock, self.iteration_s = VirtualClock(), iteration_s
        self.executor = FakeExecutor(self.clock, lambda _plan: iteration_s)
        self.scheduler = StepScheduler(slots, costs=costs or CostModel(), **limits)
        self.loop = StepLoop(self.scheduler, self.executor, self.on_event, self.clock, self.on_plan)
        self.publisher = StepLiveView("incarnation", self.scheduler, self.loop.find_request, self.clock())
        self.num_with_thumbnails, self.joined = 0, []

    def on_event(self, event):
        self.publisher.on_event(event, self.clock())

    def on_plan(self, plan):
        with_thumbnails = self.publisher.on_plan(plan, self.clock())
        self.num_with_thumbnails += with_thumbnails
        self.joined += [assignment.image.attempt_id.removesuffix(".f00d") for assignment in plan.joins]
        return with_thumbnails

    def submit(self, *requests):
        for each in requests:
            self.loop.submit(self.executor.prepare(each))

    def run_iteration(self):
        """Run one iteration, or wait as long if there is nothing to do; returns the views after it."""
        iteration = self.loop.run_iteration()
        if iteration is None:
            self.clock.now += self.iteration_s
        else:
            self.publisher.on_iteration(iteration, self.clock(), UNIX + self.clock())
        return self.views()

    def views(self):
        return [
            (subscriber, *resolve_view(pending))
            for subscriber, pending in self.publisher.views(self.clock(), UNIX + self.clock())
        ]

    def subscribe(self, subscriber="me", last_iteration=None, *, with_thumbnails=False):
        self.publisher.subscribe(subscriber, ViewRequest(last_iteration, with_thumbnails))

    def collect_views(self, actions, subscriber="me", *, with_thumbnails=False):
        """All views of `subscriber`, which asks again after each."""
        last_iteration, views = None, []
        self.subscribe(subscriber, last_iteration, with_thumbnails=with_thumbnails)
        for action in actions:
            action()
            for recipient, view, pixels in self.run_iteration():
                if recipient == subscriber:
                    views.append((view, pixels))
                    self.subscribe(subscriber, view.last_iteration, with_thumbnails=with_thumbnails)
        return views


def test_a_new_subscriber_gets_a_view_at_once():
    harness = Harness()
    harness.subscribe()
    assert harness.publisher.wait_s(harness.clock()) == 0.0
    ((subscriber, view, pixels),) = harness.views()
    assert (subscriber, view.last_iteration, view.slots, view.iterations, pixels) == ("me", 0, (), (), None)
    assert (view.incarnation, view.num_slots, view.captured_at) == ("incarnation", 4, UNIX + START)


@pytest.mark.parametrize("memory", [{}, {"evictions": 0}])
def test_an_evicted_image_keeps_its_thumbnail_and_has_one_departure(memory):
    """Also where the states of images do not fit the memory, so that they keep their slots."""
    harness = Harness(slots=1, iteration_s=VIEW_INTERVAL_S)
    harness.executor.memory = memory
    harness.submit(make_request("low", steps=9, priority="low"))
    views = harness.collect_views([lambda: None] * 3, with_thumbnails=True)
    before = views[-1][0].thumbnails[0]
    harness.submit(make_request("high", steps=2, priority="high"))
    views = harness.collect_views([lambda: None] * 14, with_thumbnails=True)
    shown = [view.slots[0].request_id for view, _ in views if view.slots]
    assert list(dict.fromkeys(shown)) == (["low", "high"] if memory else ["high", "low"])
    assert all(view.slots == () or view.slots[0].request_id == view.thumbnails[0].request_id for view, _ in views)
    assert before.request_id == "low"
    departed = [each.request_id for view, _ in views for each in view.departures]
    assert list(dict.fromkeys(departed)) == (["low", "high"] if memory else ["high", "low"])


def test_a_request_for_a_view_is_answered_once_and_only_after_a_change():
    harness = Harness()
    harness.subscribe()
    assert len(harness.views()) == 1
    assert harness.views() == []
    harness.subscribe(last_iteration=0)
    harness.clock.now += 10
    assert harness.views() == []
    assert harness.publisher.wait_s(harness.clock()) is None  # idle
    harness.submit(make_request())
    assert [view.num_waiting for _, view, _ in harness.views()] == [1]
    assert harness.views() == []


def test_a_slot_shows_its_image_its_progress_and_its_predicted_end():
    costs = CostModel()
    costs.observe_step(BatchKey(8, 8, MODEL), 2, 0.05)
    harness = Harness(costs=costs)
    inputs = {"strength": 1.0, "has_mask": True, "refiner": Refinement(0.7, "fine"), "controls": (Control("edges"),)}
    harness.submit(
        make_request(
            "a",
            steps=10,
            images=2,
            model="m",
            deadline_s=60.0,
            priority="high",
            reference_images=(Reference(8, 8, "the file's digest"),),
            image_digest="another",
            **inputs,
        )
    )
    harness.run_iteration()
    harness.run_iteration()
    harness.subscribe()
    ((_, view, _),) = harness.views()
    first, second = view.slots
    assert (first.slot, first.request_id, first.index, first.model) == (0, "a", 0, "m")
    assert (second.slot, second.index) == (1, 1)
    settings = ImageSettingsView(8, 8, "ddim", 2.0, 10, reference_images=(Reference(8, 8),), **inputs)
    assert (first.settings, first.priority) == (settings, "high")
    assert (first.call, first.num_calls) == (2, 10)
    assert (first.joined_at, first.deadline_at) == (UNIX + START, UNIX + START + 60)
    assert UNIX + harness.clock() + 8 * 0.04 < first.finish_at < UNIX + harness.clock() + 8 * 0.2


def test_the_first_waiting_requests_are_shown_in_the_order_in_which_they_join():
    harness = Harness(slots=2, policy=fcfs)
    harness.submit(
        make_request("running", steps=9, images=3), *(make_request(f"w{k:02}", steps=2) for k in range(MAX_WAITING + 5))
    )
    harness.run_iteration()
    harness.subscribe()
    ((_, view, _),) = harness.views()
    assert view.num_waiting == MAX_WAITING + 6
    assert len(view.waiting) == MAX_WAITING
    expected_order = [each.request_id for each in view.waiting]
    by_name = {each.request_id: each for each in view.waiting}
    assert by_name["running"].num_images == 1
    assert all(each.arrived_at == UNIX + START for each in view.waiting)
    harness.joined.clear()
    while len(harness.joined) < 20:
        harness.run_iteration()
    assert list(dict.fromkeys(harness.joined)) == expected_order[: len(dict.fromkeys(harness.joined))]


def test_shares_say_who_has_the_device_and_who_waits():
    harness = Harness(slots=2, iteration_s=1.0)
    harness.submit(make_request("heap", steps=50, images=4, share_client="alice"))
    views = harness.collect_views([lambda: None] * 3)
    harness.submit(make_request("other", steps=50, share_client="bob", priority="high"))
    views += harness.collect_views([lambda: None] * 3)
    shares = [
        [(each.share_client, each.num_running, each.num_waiting, each.num_evicted) for each in view.shares]
        for view, _ in (views[0], views[-1])
    ]
    assert shares == [[("alice", 2, 2, 0)], [("alice", 1, 2, 1), ("bob", 1, 0, 0)]]
    assert [each.device_share for each in views[-1][0].shares] == pytest.approx([0.75, 0.25])
    assert {slot.share_client for slot in views[-1][0].slots} == {"alice", "bob"}
    assert {waiting.share_client for waiting in views[-1][0].waiting} == {"alice"}


def test_of_very_many_clients_those_with_least_time_are_summed():
    harness = Harness(slots=2)
    harness.submit(*(make_request(f"r{k}", share_client=f"~{k}") for k in range(MAX_SHARES + 9)))
    harness.run_iteration()
    harness.subscribe()
    ((_, view, _),) = harness.views()
    assert len(view.shares) == MAX_SHARES
    assert (view.shares[-1].num_clients, view.shares[-1].num_waiting) == (10, 10)
    assert sum(each.num_running + each.num_waiting for each in view.shares) == MAX_SHARES + 9


def test_every_iteration_join_and_departure_is_shown_exactly_once():
    harness = Harness(slots=4, iteration_s=0.07)
    requests = {n: make_request(f"r{n}", steps=2 + n % 5, images=1 + n % 3) for n in range(0, 60, 2)}

    def action_at(iteration):
        def action():
            if iteration in requests:
                harness.submit(requests[iteration])
            if iteration == 31:
                harness.loop.cancel("r30.f00d")

        return action

    views = [view for view, _ in harness.collect_views([action_at(iteration) for iteration in range(400)])]
    iterations = [iteration for view in views for iteration in view.iterations]
    assert [iteration.number for iteration in iterations] == list(range(1, views[-1].last_iteration + 1))
    departures = [each for view in views for each in view.departures]
    images = {(f"r{n}", index) for n, each in requests.items() for index in range(each.payload.n)}
    assert {(each.request_id, each.index) for each in departures} <= images
    assert len(departures) == len({(each.request_id, each.index) for each in departures})
    assert sum(iteration.num_joined for iteration in iterations) == len(departures)
    assert {each.outcome for each in departures if each.request_id == "r30"} <= {"cancelled", "ok"}
    assert {(each.request_id, each.index) for each in departures if each.outcome == "ok"} >= {
        image for image in images if image[0] != "r30"
    }
    running, iteration_by_number = set(), {iteration.number: iteration for iteration in iterations}
    for view in views:
        here = {(slot.request_id, slot.index) for slot in view.slots}
        departed = {(each.request_id, each.index) for each in view.departures}
        assert running - here <= departed  # no image disappears without a departure
        assert all(each.iteration in iteration_by_number for each in view.departures)
        running = here


def test_a_departure_without_an_iteration_is_shown():
    harness = Harness()
    harness.submit(make_request("gone", steps=50))
    views = []
    for view, _ in harness.collect_views([lambda: None] * 5):
        views.append(view)
    harness.loop.cancel("gone.f00d")
    harness.clock.now += 1
    assert harness.publisher.wait_s(harness.clock()) == 0.0
    ((_, view, _),) = harness.views()
    assert view.slots == ()
    assert [(each.request_id, each.slot, each.outcome, each.iteration) for each in view.departures] == [
        ("gone", 0, "cancelled", view.last_iteration)
    ]


def test_a_subscriber_gets_five_views_a_second_with_all_iterations_between_them():
    harness = Harness(iteration_s=0.01)
    harness.submit(make_request(steps=500))
    views = [view for view, _ in harness.collect_views([lambda: None] * 500)]
    assert 5.0 / VIEW_INTERVAL_S - 2 <= len(views) <= 5.0 / VIEW_INTERVAL_S + 2
    assert [iteration.number for iteration in views[5].iterations] == list(
        range(views[4].last_iteration + 1, views[5].last_iteration + 1)
    )


@pytest.mark.parametrize(("took_s", "between_s"), [(0.001, VIEW_INTERVAL_S), (0.005, 0.5), (3.0, MAX_VIEW_INTERVAL_S)])
def test_expensive_views_are_less_frequent(took_s, between_s):
    harness = Harness(iteration_s=0.01)
    harness.submit(make_request(steps=500))
    harness.subscribe()
    ((_, view, _),) = harness.run_iteration()
    shown_at_s = []
    for _ in range(400):
        harness.subscribe(last_iteration=view.last_iteration)
        if harness.run_iteration():
            shown_at_s.append(harness.clock())
            harness.publisher.record_cost(took_s)
    between = [later - earlier for earlier, later in itertools.pairwise(shown_at_s)]
    assert len(between) >= 3
    assert between == pytest.approx([between_s] * len(between), abs=0.011)  # an iteration


def test_new_subscribers_delay_no_other_and_take_no_more_of_the_loops_time():
    harness = Harness(iteration_s=0.01)
    harness.submit(make_request(steps=500))
    took_s, num_views, mine, last_iteration = 0.005, 0, [], None
    for _ in range(400):
        harness.subscribe("me", last_iteration)
        harness.subscribe(f"new {len(mine)}")  # which leaves and returns before each iteration
        views = harness.run_iteration()
        if views:
            num_views += 1
            harness.publisher.record_cost(took_s)
        for subscriber, view, _ in views:
            if subscriber == "me":
                last_iteration = view.last_iteration
                mine.append(view)
    assert num_views <= 4.0 / 0.5 + 1  # 1 % of the time
    assert len(mine) == num_views


def test_kept_iterations_and_departures_are_bounded():
    harness = Harness(slots=4)
    for k in range(MAX_KEPT):
        harness.submit(make_request(f"r{k}", steps=1), make_request(f"s{k}", steps=1))
        harness.run_iteration()
    harness.submit(make_request("last", steps=MAX_KEPT))
    for _ in range(MAX_KEPT):
        harness.run_iteration()
    harness.subscribe()
    ((_, view, _),) = harness.views()
    assert [iteration.number for iteration in view.iterations] == list(range(MAX_KEPT + 1, 2 * MAX_KEPT + 1))
    assert view.departures == ()  # they were before the subscription
    assert len(harness.publisher._departures) == MAX_KEPT
    assert len(harness.publisher._image_states) == 0


def test_without_a_subscriber_to_thumbnails_no_iteration_makes_them():
    harness = Harness()
    harness.submit(make_request(steps=20))
    views = harness.collect_views([lambda: None] * 20)
    assert harness.num_with_thumbnails == 0
    assert all(pixels is None and view.thumbnails == () for view, pixels in views)


def test_every_running_image_has_a_thumbnail_and_few_iterations_make_them():
    harness = Harness(iteration_s=0.01)
    harness.submit(make_request("a", steps=200, images=2), make_request("b", steps=200))
    views = harness.collect_views([lambda: None] * 200, with_thumbnails=True)
    for view, pixels in views[1:]:
        assert [
            (thumbnail.request_id, thumbnail.index, thumbnail.slot, thumbnail.offset) for thumbnail in view.thumbnails
        ] == [(slot.request_id, slot.index, slot.slot, 3 * number) for number, slot in enumerate(view.slots)]
        assert pixels == bytes([7] * 3 + [8] * 3 + [7] * 3)
    assert harness.num_with_thumbnails <= len(views) + 1


@pytest.mark.parametrize("iteration_s", [0.01, 2 * MAX_VIEW_INTERVAL_S])
def test_after_a_subscribers_last_request_at_most_one_iteration_makes_thumbnails(iteration_s):
    harness = Harness(iteration_s=iteration_s)
    harness.submit(make_request(steps=100))
    harness.collect_views([lambda: None] * 30, with_thumbnails=True)
    while not harness.run_iteration():  # until the last view
        pass
    before = harness.num_with_thumbnails
    for _ in range(60):
        assert harness.run_iteration() == []
    assert harness.num_with_thumbnails - before <= 1


def test_paused_images_keep_their_last_thumbnail_until_they_leave():
    harness = Harness(slots=2, iteration_s=0.3)
    harness.submit(make_request("long", steps=40), make_request("short", steps=2, side_px=16))
    views = harness.collect_views([lambda: None] * 30, with_thumbnails=True)
    with_short = [view for view, _ in views if any(slot.request_id == "short" for slot in view.slots)]
    assert any(len(view.thumbnails) == 2 for view in with_short)
    last = views[-1][0]
    assert (
        [slot.request_id for slot in last.slots] == ["long"] == [thumbnail.request_id for thumbnail in last.thumbnails]
    )


def test_an_image_without_a_step_for_a_second_is_paused_until_it_steps():
    harness = Harness(slots=8, iteration_s=0.3)
    harness.submit(make_request("one", steps=40), make_request("many", steps=40, images=7, side_px=16))
    views = [view for view, _ in harness.collect_views([lambda: None] * 40)]
    ones = [slot for view in views for slot in view.slots if slot.request_id == "one"]
    assert {slot.paused for slot in ones} == {True, False}
    for before, after in itertools.pairwise(ones):
        assert not (after.paused and after.call > before.call), "it has just stepped"
    assert not any(slot.paused for view in views for slot in view.slots if slot.request_id == "many")


def test_two_sizes_that_alternate_are_never_paused():
    harness = Harness(slots=4, iteration_s=0.1)
    harness.submit(make_request("a", steps=60), make_request("b", steps=60, side_px=16))
    views = [view for view, _ in harness.collect_views([lambda: None] * 60)]
    assert not any(slot.paused for view in views for slot in view.slots)


def test_an_iteration_has_the_rows_of_each_size_in_its_call():
    harness = Harness(slots=8)
    for name, side_px, guidance in (("small", 8, 1.0), ("large", 16, 3.0), ("same", 16, 1.0)):
        request = make_request(name, steps=4, images=2, side_px=side_px, guidance_scale=guidance)
        harness.loop.submit(MixedRequest(request, guided=guidance > 1))
    iterations = [each for view, _ in harness.collect_views([lambda: None] * 20) for each in view.iterations]
    sizes = {iteration.call_sizes for iteration in iterations}
    assert (CallSizeView(16, 16, 6), CallSizeView(8, 8, 2)) in sizes
    assert () in sizes  # an iteration of decodes alone

    harness = Harness(slots=4)
    harness.submit(make_request("a", steps=4), make_request("b", steps=4, side_px=16))
    iterations = [each for view, _ in harness.collect_views([lambda: None] * 20) for each in view.iterations]
    assert {iteration.call_sizes for iteration in iterations} == {()}


def test_images_that_did_not_fit_the_memory_have_not_joined():
    harness = Harness(slots=8)
    harness.executor.memory = {"joins": 3}
    harness.submit(*(make_request(f"r{k}", steps=3) for k in range(8)))
    views = [view for view, _ in harness.collect_views([lambda: None] * 40)]
    iterations = [iteration for view in views for iteration in view.iterations]
    assert iterations[0].num_joined == 0 == iterations[0].num_stepped
    assert sum(iteration.num_joined for iteration in iterations) == 8 == sum(len(view.departures) for view in views)


def test_rates_are_updated_while_idle_until_they_are_zero():
    harness = Harness()
    harness.submit(make_request(steps=2))
    views = harness.collect_views([lambda: None] * 4)
    while (wait_s := harness.publisher.wait_s(harness.clock())) is not None:
        harness.clock.now += wait_s
        ((_, view, _),) = harness.views()
        views.append((view, None))
        harness.subscribe(last_iteration=view.last_iteration)
    rates = [view.rates for view, _ in views]
    assert rates[-1].requests_per_s == 0 == rates[-1].busy
    assert max(each.requests_per_s for each in rates) > 0
    assert 55 <= len(rates) <= 70
    assert next(each.p50_s for each in reversed(rates) if each.p50_s) == pytest.approx(0.1)


def test_an_unsubscribed_client_gets_no_view():
    harness = Harness()
    harness.subscribe("me")
    harness.subscribe("other")
    harness.publisher.unsubscribe("me")
    assert [subscriber for subscriber, _, _ in harness.views()] == ["other"]
