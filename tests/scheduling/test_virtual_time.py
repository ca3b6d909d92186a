"""What the policies promise, held in virtual time: the real scheduler, the real wheel, a device whose turns take what a curve says.

Bounds are derived beside each test. Times are seconds; `TURN_S` and `DECODE_S` are the longest that one step and one decode can take.
"""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.loop import Ended, Moved, Wheel
from noria.request import ImageRequest
from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import End, ShapeClass
from noria.scheduling.policies import PATIENCE_S, POLICIES
from noria.scheduling.steps import StepScheduler

SIDES = (8, 16, 24)
STEPS = {1: 0.010, 2: 0.011, 4: 0.014, 8: 0.022}
DECODES = {1: 0.004, 2: 0.006, 4: 0.010}
MOST_ROWS = 8
TURN_S, DECODE_S = 2.0 * STEPS[8], 2.0 * DECODES[4]  # of the largest shape, twice the smallest's

every_policy = pytest.mark.parametrize("policy", list(POLICIES))
in_virtual_time = settings(max_examples=60, deadline=None)


def shape(side_px):
    return ShapeClass(side_px, side_px, "m")


def exact_costs(most_rows=MOST_ROWS, sides=SIDES):
    costs = CostModel(most_rows)
    for side_px in sides:
        factor = 0.75 + side_px / 8 * 0.25 if side_px > 8 else 1.0
        costs.steps[shape(side_px)] = Curve({rows: factor * s for rows, s in STEPS.items()})
        costs.decodes[shape(side_px)] = Curve({images: factor * s for images, s in DECODES.items()})
    return costs


@dataclass(frozen=True)
class Ask:
    """A request of the tests' traffic."""

    at_s: float = 0.0
    steps: int = 5
    images: int = 1
    side_px: int = 8
    rows: int = 2
    priority: str = "normal"
    deadline_s: float | None = None
    alone: bool = False

    def request(self, name):
        guidance = 2.0 if self.rows == 2 else 1.0
        return ImageRequest(
            name,
            "a circle",
            "",
            7,
            self.side_px,
            self.side_px,
            self.steps,
            guidance,
            self.images,
            "ddim",
            math.inf,
            model="m",
            priority=self.priority,
            deadline_s=self.deadline_s,
            alone=self.alone,
        )


@dataclass
class World:
    """A wheel on virtual time, what was asked of it, and what became of it. Its turns take exactly what `exact_costs` says."""

    policy: str = "least-slack"
    slots: int = 4
    most_rows: int = MOST_ROWS
    limits: dict = field(default_factory=dict)

    def __post_init__(self):
        self.truth = exact_costs(self.most_rows)
        self.clock = VirtualClock()
        self.asks, self.arrived, self.ends, self.ended_at, self.told = {}, {}, {}, {}, {}
        scheduler = StepScheduler(
            self.slots,
            policy=POLICIES[self.policy],
            costs=exact_costs(self.most_rows),
            **{"queue_limit": 10_000} | self.limits,
        )
        self.scheduler = scheduler
        self.executor = FakeExecutor(self.clock, self.turn_s)
        self.wheel = Wheel(scheduler, self.executor, self.take, self.clock)

    def turn_s(self, plan):
        crowd = self.scheduler._crowd  # as the turn begins: who boards has boarded
        self.seated, self.waiting = self.scheduler.num_seated, self.scheduler.num_waiting
        self.calls_left = {image: each.ticket.num_calls - each.call for image, each in crowd.seated.items()}
        steps_s = decode_s = 0.0
        if plan.steps:
            first = self.asks[plan.steps[0].image.request_id]
            rows = sum(self.asks[step.image.request_id].rows for step in plan.steps)
            steps_s = self.truth.step_s(shape(first.side_px), rows)
        if plan.decodes:
            first = self.asks[plan.decodes[0].image.request_id]
            decode_s = self.truth.decode_s(shape(first.side_px), len(plan.decodes))
        return steps_s + decode_s

    def take(self, event):
        name = event.prepared.request.request_id
        if isinstance(event, Ended):
            assert name not in self.ends
            self.ends[name], self.ended_at[name] = event.event.end, self.clock.now
        elif isinstance(event, Moved):
            self.told.setdefault(name, event.whereabouts)

    def submit(self, ask, name=None):
        name = name or f"r{len(self.asks)}"
        self.asks[name], self.arrived[name] = ask, self.clock.now
        self.wheel.submit(self.executor.prepare(ask.request(name)))
        return name

    def run(self, traffic=(), check=lambda _plan: None):
        """Turn until all of `traffic` is done."""
        coming = sorted(traffic, key=lambda ask: ask.at_s)
        while True:
            while coming and coming[0].at_s <= self.clock.now:
                self.submit(coming.pop(0))
            turn = self.wheel.turn()
            if turn is not None:
                check(turn.plan)
            elif coming:
                self.clock.now = coming[0].at_s
            else:
                return


asks = st.builds(
    Ask,
    at_s=st.floats(0, 2.0),
    steps=st.integers(1, 20),
    images=st.integers(1, 4),
    side_px=st.sampled_from(SIDES),
    rows=st.integers(1, 2),
    priority=st.sampled_from(["low", "normal", "high"]),
    deadline_s=st.none() | st.floats(0.01, 3.0),
)


@every_policy
@in_virtual_time
@given(traffic=st.lists(asks, max_size=25), slots=st.integers(1, 6), most_rows=st.integers(1, 8))
def test_the_wheel_never_works_less_than_it_could(policy, traffic, slots, most_rows):
    """No turn of nothing; no free slot while somebody waits; a call has all its class's images, or no more of them would pay, or, while
    slots are free, a larger call might make a deadline be missed (`scheduling/batches.py`).
    """
    world = World(policy, slots, most_rows)

    def check(plan):
        assert plan.steps or plan.decodes
        assert world.seated == slots or not world.waiting
        if not plan.steps:
            return
        side_px = world.asks[plan.steps[0].image.request_id].side_px
        stepped = {step.image for step in plan.steps}
        if world.seated < slots and any(world.asks[image.request_id].deadline_s is not None for image in stepped):
            return
        room = most_rows - sum(world.asks[image.request_id].rows for image in stepped)
        for image, calls_left in world.calls_left.items():
            ask = world.asks[image.request_id]
            if image not in stepped and ask.side_px == side_px and calls_left:
                assert ask.rows > room, "it would have paid"

    world.run(traffic, check)
    assert len(world.ends) == len(traffic)


# What each policy lets pass whoever waits, for ever: newer work with a deadline and a high priority, older work, or shorter work.
PREFERRED = {
    "least-slack": Ask(steps=3, priority="high", deadline_s=0.5),
    "fcfs": Ask(steps=3),
    "shortest-first": Ask(steps=1, rows=1),
}


@every_policy
@settings(max_examples=8, deadline=None)
@given(
    patient=st.builds(
        Ask,
        steps=st.integers(1, 40),
        images=st.integers(1, 3),
        side_px=st.sampled_from(SIDES),
        rows=st.integers(1, 2),
        priority=st.just("high"),  # the least patient: others take longer to try
        alone=st.booleans(),
    ),
    slots=st.integers(1, 3),
    most_rows=st.integers(1, 4),
)
def test_nobody_starves_under_an_endless_stream_of_what_the_policy_prefers(policy, patient, slots, most_rows):
    """A request that waits is overtaken only until its key is below that of whoever comes anew; the policy says when.

    least-slack: a newcomer's deadline is not before its arrival and priority takes 30 s off it, so nobody new goes ahead after the
    patience and 30 s more. fcfs: nobody new ever does. shortest-first: nobody new does after twice its own work, which in company takes
    at most `steps` of the longest turns. From then on only those who are here go first: the queue is kept at `MOST` images, and its
    own are `images`; each takes at most its steps of the longest turn and a decode, and of shape classes three share the device.
    """
    world, most = World(policy, slots, most_rows), 6
    preferred = PREFERRED[policy]
    for _ in range(most):
        world.submit(preferred)
    name = world.submit(patient)
    own_s = patient.images * (patient.steps * TURN_S + DECODE_S)
    overtaken_s = {
        "least-slack": PATIENCE_S[patient.priority] + 30.0,
        "fcfs": 0.0,
        "shortest-first": 2 * own_s,
    }[policy]
    others_s = (most + slots) * (preferred.steps * TURN_S + DECODE_S)
    bound_s = overtaken_s + 3 * (own_s + others_s) + 0.5 + TURN_S + DECODE_S
    while name not in world.ends:
        while world.scheduler.num_waiting < most:
            if world.submit(preferred) in world.ends:
                break  # refused: it could not be in time
        world.wheel.turn()
        assert world.clock.now <= bound_s, "starved"
    assert world.ends[name] is End.FINISHED


one_class = st.builds(
    Ask,
    at_s=st.floats(0, 0.5),
    steps=st.integers(1, 12),
    images=st.integers(1, 3),
    rows=st.just(2),
    priority=st.sampled_from(["low", "normal", "high"]),
    deadline_s=st.none() | st.floats(0.02, 1.5),
)


@pytest.mark.parametrize("policy", ["least-slack", "fcfs"])
@settings(max_examples=150, deadline=None)
@given(traffic=st.lists(one_class, max_size=14), slots=st.integers(1, 6))
def test_with_exact_costs_an_accepted_deadline_is_always_met(policy, traffic, slots):
    """One class, one image a call, deadlines or none, coming at any time. What is accepted is simulated as it will be, and later ones
    are accepted only if nobody with a promise is made late, or go behind; so nothing but rounding can break it.
    """
    world = World(policy, slots, most_rows=2)
    world.run(traffic)
    for name, end in world.ends.items():
        assert end in (End.FINISHED, End.UNMEETABLE), world.asks[name]
        if end is End.FINISHED and (deadline_s := world.asks[name].deadline_s) is not None:
            assert world.ended_at[name] <= world.arrived[name] + deadline_s + 1e-6


@settings(max_examples=150, deadline=None)
@given(works=st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 0.5)), min_size=1, max_size=8), data=st.data())
def test_what_is_feasible_at_all_is_accepted_and_met_by_least_slack(works, data):
    """Requests that are known at one instant, one image a call, a slot for each. By deadline is feasible if anything is (Jackson, 1955):
    each set here is feasible in that order, with a microsecond to spare against rounding; and comes in any order.
    """
    costs, elapsed_s, feasible = exact_costs(2), 0.0, []
    deadline_s = 0.0
    for steps, spare_s in works:
        elapsed_s += steps * costs.step_s(shape(8), 2) + costs.decode_s(shape(8))
        deadline_s = max(deadline_s, elapsed_s + 1e-6) + spare_s
        feasible.append(Ask(steps=steps, deadline_s=deadline_s))
    world = World(slots=len(works), most_rows=2)
    world.run(data.draw(st.permutations(feasible)))
    assert set(world.ends.values()) == {End.FINISHED}
    assert all(world.ended_at[name] <= ask.deadline_s for name, ask in world.asks.items())


def test_a_short_request_is_accepted_though_a_long_one_has_less_to_lose():
    """The long one has 20 ms of slack, the short one 30 ms; only the order of deadlines serves both."""
    world = World(slots=2, most_rows=2)
    long = world.submit(Ask(steps=10, deadline_s=10 * 0.011 + 0.004 + 0.020))
    short = world.submit(Ask(steps=1, deadline_s=0.011 + 0.004 + 0.030))
    world.run()
    assert (world.ends[long], world.ends[short]) == (End.FINISHED, End.FINISHED)


def test_who_has_no_deadline_goes_behind_those_whom_it_would_make_late():
    world = World(slots=2, most_rows=2)
    promised = world.submit(Ask(steps=600, deadline_s=7.0))
    patient = world.submit(Ask(steps=100, priority="high"))
    world.run()
    assert world.ends == {promised: End.FINISHED, patient: End.FINISHED}
    assert world.ended_at[patient] > world.ended_at[promised]


def test_who_goes_behind_stays_behind_whatever_rounding_does():
    world = World(slots=1, most_rows=2)
    for ask in [Ask(steps=12, images=3, priority="high")] * 2 + [Ask(steps=1, priority="low", deadline_s=0.95)]:
        world.submit(ask)
    world.clock.now = 0.1
    behind = world.submit(Ask(steps=8, images=9, priority="high"))
    world.run()
    assert world.ends["r2"] is End.FINISHED
    assert world.ended_at[behind] > world.ended_at["r2"]


def test_who_has_no_deadline_goes_by_its_patience_where_that_makes_nobody_late():
    world = World(slots=2, most_rows=2)
    promised = world.submit(Ask(steps=600, deadline_s=9.0))
    patient = world.submit(Ask(steps=100, priority="high"))
    world.run()
    assert world.ended_at[patient] < world.ended_at[promised] <= 9.0


@pytest.mark.parametrize("policy", ["least-slack", "fcfs"])
@settings(max_examples=150, deadline=None)
@given(
    traffic=st.lists(
        st.builds(Ask, steps=st.integers(1, 15), images=st.integers(1, 4), rows=st.integers(1, 2)),
        min_size=1,
        max_size=12,
    ),
    slots=st.integers(1, 6),
    most_rows=st.integers(1, 8),
)
def test_what_is_foretold_of_one_class_comes_true(policy, traffic, slots, most_rows):
    """Exact costs, nobody to come: the forecast boards, steps and decodes by the scheduler's rules, so it is off by one turn and one decode
    at most, which is when two images are drawn at once and the order of their decoding is another than that of their boarding.
    """
    world = World(policy, slots, most_rows)
    names = [world.submit(ask) for ask in traffic]
    told = world.scheduler.whereabouts(names, 0.0)
    world.run()
    for name in names:
        assert abs(world.ended_at[name] - told[name].finish_in_s) <= STEPS[8] + DECODES[4]


@every_policy
@settings(max_examples=100, deadline=None)
@given(
    traffic=st.lists(
        st.builds(Ask, steps=st.integers(1, 15), rows=st.integers(1, 2), side_px=st.sampled_from(SIDES)),
        min_size=1,
        max_size=10,
    )
)
def test_what_is_foretold_of_several_classes_comes_true_but_for_what_sharing_allows(policy, traffic):
    """All have slots. The forecast has the classes share the device at every instant; the device may be half a second and a turn of each
    class behind that (shares.py), for each class that finishes or comes to be alone, and each image's decoding is a turn of its own.
    """
    world = World(policy, slots=10)
    names = [world.submit(ask) for ask in traffic]
    told = world.scheduler.whereabouts(names, 0.0)
    world.run()
    classes = len({ask.side_px for ask in traffic})
    off_s = (0.5 + classes * TURN_S) * (classes - 1) + len(traffic) * DECODE_S + TURN_S
    for name in names:
        assert abs(world.ended_at[name] - told[name].finish_in_s) <= off_s
