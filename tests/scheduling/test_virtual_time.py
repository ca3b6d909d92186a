"""What the policies promise, held in virtual time: the real scheduler, the real wheel, a device whose turns take what a curve says.

Bounds are derived beside each test. Times are seconds; `TURN_S` and `DECODE_S` are the longest that one step and one decode can take.
"""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.loop import EngineLoop, ProgressChanged, RequestClosed
from noria.engine.runtime import FakeExecutor, VirtualClock
from noria.protocol.request import ImageRequest
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import IMPLICIT_DEADLINE_S, POLICIES
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason

SIDES = (8, 16, 24)
STEPS = {1: 0.010, 2: 0.011, 4: 0.014, 8: 0.022}
DECODES = {1: 0.004, 2: 0.006, 4: 0.010}
MAX_ROWS = 8
ITERATION_S, DECODE_S = 2.0 * STEPS[8], 2.0 * DECODES[4]  # of the largest shape, twice the smallest's

every_policy = pytest.mark.parametrize("policy", list(POLICIES))
in_virtual_time = settings(max_examples=60, deadline=None)


def batch_key(side_px):
    return BatchKey(side_px, side_px, "m")


def exact_costs(max_rows=MAX_ROWS, sides=SIDES):
    costs = CostModel(max_rows)
    for side_px in sides:
        factor = 0.75 + side_px / 8 * 0.25 if side_px > 8 else 1.0
        costs.steps[batch_key(side_px)] = CostCurve({rows: factor * s for rows, s in STEPS.items()})
        costs.decodes[batch_key(side_px)] = CostCurve({images: factor * s for images, s in DECODES.items()})
    return costs


@dataclass(frozen=True)
class TrafficRequest:
    """A request of the tests' traffic."""

    at_s: float = 0.0
    steps: int = 5
    images: int = 1
    side_px: int = 8
    rows: int = 2
    priority: str = "normal"
    deadline_s: float | None = None
    exclusive: bool = False

    def image_request(self, name):
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
            exclusive=self.exclusive,
        )


@dataclass
class Simulation:
    """A wheel on virtual time, what was asked of it, and what became of it. Its turns take exactly what `exact_costs` says."""

    policy: str = "least-slack"
    num_slots: int = 4
    max_rows: int = MAX_ROWS
    limits: dict = field(default_factory=dict)

    def __post_init__(self):
        self.truth = exact_costs(self.max_rows)
        self.clock = VirtualClock()
        self.submitted, self.arrived, self.ends, self.ended_at, self.predicted = {}, {}, {}, {}, {}
        scheduler = StepScheduler(
            self.num_slots,
            policy=POLICIES[self.policy],
            costs=exact_costs(self.max_rows),
            **{"queue_limit": 10_000} | self.limits,
        )
        self.scheduler = scheduler
        self.executor = FakeExecutor(self.clock, self.iteration_s)
        self.loop = EngineLoop(scheduler, self.executor, self.record, self.clock)

    def iteration_s(self, plan):
        table = self.scheduler._table  # as the turn begins: who boards has boarded
        self.num_running, self.num_waiting = self.scheduler.num_running, self.scheduler.num_waiting
        self.calls_left = {image: each.request.num_calls - each.call for image, each in table.running.items()}
        steps_s = decode_s = 0.0
        if plan.steps:
            first = self.submitted[plan.steps[0].image.request_id]
            rows = sum(self.submitted[step.image.request_id].rows for step in plan.steps)
            steps_s = self.truth.step_s(batch_key(first.side_px), rows)
        if plan.decodes:
            first = self.submitted[plan.decodes[0].image.request_id]
            decode_s = self.truth.decode_s(batch_key(first.side_px), len(plan.decodes))
        return steps_s + decode_s

    def record(self, event):
        name = event.prepared.request.request_id
        if isinstance(event, RequestClosed):
            assert name not in self.ends
            self.ends[name], self.ended_at[name] = event.event.finish_reason, self.clock.now
        elif isinstance(event, ProgressChanged):
            self.predicted.setdefault(name, event.progress)

    def submit(self, request, name=None):
        name = name or f"r{len(self.submitted)}"
        self.submitted[name], self.arrived[name] = request, self.clock.now
        self.loop.submit(self.executor.prepare(request.request(name)))
        return name

    def run(self, traffic=(), check=lambda _plan: None):
        """Turn until all of `traffic` is done."""
        upcoming = sorted(traffic, key=lambda request: request.at_s)
        while True:
            while upcoming and upcoming[0].at_s <= self.clock.now:
                self.submit(upcoming.pop(0))
            iteration = self.loop.run_iteration()
            if iteration is not None:
                check(iteration.plan)
            elif upcoming:
                self.clock.now = upcoming[0].at_s
            else:
                return


traffic_requests = st.builds(
    TrafficRequest,
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
@given(traffic=st.lists(traffic_requests, max_size=25), slots=st.integers(1, 6), most_rows=st.integers(1, 8))
def test_the_wheel_never_works_less_than_it_could(policy, traffic, slots, most_rows):
    """No turn of nothing; no free slot while somebody waits; a call has all its class's images, or no more of them would pay, or, while
    slots are free, a larger call might make a deadline be missed (`scheduling/step/batch_selection.py`).
    """
    simulation = Simulation(policy, slots, most_rows)

    def check(plan):
        assert plan.steps or plan.decodes
        assert simulation.num_running == slots or not simulation.num_waiting
        if not plan.steps:
            return
        side_px = simulation.submitted[plan.steps[0].image.request_id].side_px
        stepped = {step.image for step in plan.steps}
        if simulation.num_running < slots and any(
            simulation.submitted[image.request_id].deadline_s is not None for image in stepped
        ):
            return
        room = most_rows - sum(simulation.submitted[image.request_id].rows for image in stepped)
        for image, calls_left in simulation.calls_left.items():
            request = simulation.submitted[image.request_id]
            if image not in stepped and request.side_px == side_px and calls_left:
                assert request.rows > room, "it would have paid"

    simulation.run(traffic, check)
    assert len(simulation.ends) == len(traffic)


# What each policy lets pass whoever waits, for ever: newer work with a deadline and a high priority, older work, or shorter work.
PREFERRED = {
    "least-slack": TrafficRequest(steps=3, priority="high", deadline_s=0.5),
    "fcfs": TrafficRequest(steps=3),
    "shortest-first": TrafficRequest(steps=1, rows=1),
}


@every_policy
@settings(max_examples=8, deadline=None)
@given(
    patient=st.builds(
        TrafficRequest,
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
    simulation, max_waiting = Simulation(policy, slots, most_rows), 6
    preferred = PREFERRED[policy]
    for _ in range(max_waiting):
        simulation.submit(preferred)
    name = simulation.submit(patient)
    own_s = patient.images * (patient.steps * ITERATION_S + DECODE_S)
    overtaken_s = {
        "least-slack": IMPLICIT_DEADLINE_S[patient.priority] + 30.0,
        "fcfs": 0.0,
        "shortest-first": 2 * own_s,
    }[policy]
    others_s = (max_waiting + slots) * (preferred.steps * ITERATION_S + DECODE_S)
    bound_s = overtaken_s + 3 * (own_s + others_s) + 0.5 + ITERATION_S + DECODE_S
    while name not in simulation.ends:
        while simulation.scheduler.num_waiting < max_waiting:
            if simulation.submit(preferred) in simulation.ends:
                break  # refused: it could not be in time
        simulation.loop.run_iteration()
        assert simulation.clock.now <= bound_s, "starved"
    assert simulation.ends[name] is FinishReason.FINISHED


one_class = st.builds(
    TrafficRequest,
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
    simulation = Simulation(policy, slots, max_rows=2)
    simulation.run(traffic)
    for name, end in simulation.ends.items():
        assert end in (FinishReason.FINISHED, FinishReason.UNMEETABLE), simulation.submitted[name]
        if end is FinishReason.FINISHED and (deadline_s := simulation.submitted[name].deadline_s) is not None:
            assert simulation.ended_at[name] <= simulation.arrived[name] + deadline_s + 1e-6


@settings(max_examples=150, deadline=None)
@given(works=st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 0.5)), min_size=1, max_size=8), data=st.data())
def test_what_is_feasible_at_all_is_accepted_and_met_by_least_slack(works, data):
    """Requests that are known at one instant, one image a call, a slot for each. By deadline is feasible if anything is (Jackson, 1955):
    each set here is feasible in that order, with a microsecond to spare against rounding; and comes in any order.
    """
    costs, elapsed_s, feasible = exact_costs(2), 0.0, []
    deadline_s = 0.0
    for steps, spare_s in works:
        elapsed_s += steps * costs.step_s(batch_key(8), 2) + costs.decode_s(batch_key(8))
        deadline_s = max(deadline_s, elapsed_s + 1e-6) + spare_s
        feasible.append(TrafficRequest(steps=steps, deadline_s=deadline_s))
    simulation = Simulation(num_slots=len(works), max_rows=2)
    simulation.run(data.draw(st.permutations(feasible)))
    assert set(simulation.ends.values()) == {FinishReason.FINISHED}
    assert all(simulation.ended_at[name] <= request.deadline_s for name, request in simulation.submitted.items())


def test_a_short_request_is_accepted_though_a_long_one_has_less_to_lose():
    """The long one has 20 ms of slack, the short one 30 ms; only the order of deadlines serves both."""
    simulation = Simulation(num_slots=2, max_rows=2)
    long = simulation.submit(TrafficRequest(steps=10, deadline_s=10 * 0.011 + 0.004 + 0.020))
    short = simulation.submit(TrafficRequest(steps=1, deadline_s=0.011 + 0.004 + 0.030))
    simulation.run()
    assert (simulation.ends[long], simulation.ends[short]) == (FinishReason.FINISHED, FinishReason.FINISHED)


def test_who_has_no_deadline_goes_behind_those_whom_it_would_make_late():
    simulation = Simulation(num_slots=2, max_rows=2)
    promised = simulation.submit(TrafficRequest(steps=600, deadline_s=7.0))
    patient = simulation.submit(TrafficRequest(steps=100, priority="high"))
    simulation.run()
    assert simulation.ends == {promised: FinishReason.FINISHED, patient: FinishReason.FINISHED}
    assert simulation.ended_at[patient] > simulation.ended_at[promised]


def test_who_goes_behind_stays_behind_whatever_rounding_does():
    simulation = Simulation(num_slots=1, max_rows=2)
    for request in [TrafficRequest(steps=12, images=3, priority="high")] * 2 + [
        TrafficRequest(steps=1, priority="low", deadline_s=0.95)
    ]:
        simulation.submit(request)
    simulation.clock.now = 0.1
    behind = simulation.submit(TrafficRequest(steps=8, images=9, priority="high"))
    simulation.run()
    assert simulation.ends["r2"] is FinishReason.FINISHED
    assert simulation.ended_at[behind] > simulation.ended_at["r2"]


def test_who_has_no_deadline_goes_by_its_patience_where_that_makes_nobody_late():
    simulation = Simulation(num_slots=2, max_rows=2)
    promised = simulation.submit(TrafficRequest(steps=600, deadline_s=9.0))
    patient = simulation.submit(TrafficRequest(steps=100, priority="high"))
    simulation.run()
    assert simulation.ended_at[patient] < simulation.ended_at[promised] <= 9.0


@pytest.mark.parametrize("policy", ["least-slack", "fcfs"])
@settings(max_examples=150, deadline=None)
@given(
    traffic=st.lists(
        st.builds(TrafficRequest, steps=st.integers(1, 15), images=st.integers(1, 4), rows=st.integers(1, 2)),
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
    simulation = Simulation(policy, slots, most_rows)
    names = [simulation.submit(request) for request in traffic]
    predicted = simulation.scheduler.progress(names, 0.0)
    simulation.run()
    for name in names:
        assert abs(simulation.ended_at[name] - predicted[name].finish_in_s) <= STEPS[8] + DECODES[4]


@every_policy
@settings(max_examples=100, deadline=None)
@given(
    traffic=st.lists(
        st.builds(TrafficRequest, steps=st.integers(1, 15), rows=st.integers(1, 2), side_px=st.sampled_from(SIDES)),
        min_size=1,
        max_size=10,
    )
)
def test_what_is_foretold_of_several_classes_comes_true_but_for_what_sharing_allows(policy, traffic):
    """All have slots. The forecast has the classes share the device at every instant; the device may be half a second and a turn of each
    class behind that (shares.py), for each class that finishes or comes to be alone, and each image's decoding is a turn of its own.
    """
    simulation = Simulation(policy, num_slots=10)
    names = [simulation.submit(request) for request in traffic]
    predicted = simulation.scheduler.progress(names, 0.0)
    simulation.run()
    num_keys = len({request.side_px for request in traffic})
    off_s = (0.5 + num_keys * ITERATION_S) * (num_keys - 1) + len(traffic) * DECODE_S + ITERATION_S
    for name in names:
        assert abs(simulation.ended_at[name] - predicted[name].finish_in_s) <= off_s
