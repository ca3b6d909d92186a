"""Guarantees of each policy, in virtual time: the real scheduler and engine loop, on a device with known costs.

Each test derives its bound. Times are seconds; `ITERATION_S` and `DECODE_S` are the longest that one step and one
decode can take.
"""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.loop import ProgressChanged, RequestEnded, StepLoop
from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import IMPLICIT_DEADLINE_S, POLICIES
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import START, VirtualClock
from searching import examples

SIDES = (8, 16, 24)
STEPS = {1: 0.010, 2: 0.011, 4: 0.014, 8: 0.022}
DECODES = {1: 0.004, 2: 0.006, 4: 0.010}
MAX_ROWS = 8
ITERATION_S, DECODE_S = 2.0 * STEPS[8], 2.0 * DECODES[4]  # times of the largest shape, twice the smallest's

every_policy = pytest.mark.parametrize("policy", list(POLICIES))
in_virtual_time = settings(max_examples=examples(12), deadline=None)


def batch_key(side_px):
    return BatchKey(side_px, side_px, ModelKey("m"))


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
    client: str = ""
    weight: float = 1.0

    def image_request(self, name):
        return make_image_request(
            name,
            "m",
            width=self.side_px,
            height=self.side_px,
            inference_steps=self.steps,
            guidance_scale=float(self.rows),
            n=self.images,
            priority=self.priority,
            deadline_s=self.deadline_s,
            exclusive=self.exclusive,
            share_client=self.client,
            share_weight=self.weight,
        )


@dataclass
class Simulation:
    """An engine loop on virtual time, its requests and their ends. Iterations take exactly what `exact_costs` says."""

    policy: str = "least-slack"
    num_slots: int = 4
    max_rows: int = MAX_ROWS
    limits: dict = field(default_factory=dict)

    def __post_init__(self):
        self.truth = exact_costs(self.max_rows)
        self.clock = VirtualClock()
        self.submitted, self.arrived, self.finish_reasons, self.ended_at, self.predicted = {}, {}, {}, {}, {}
        scheduler = StepScheduler(
            self.num_slots,
            policy=POLICIES[self.policy],
            costs=exact_costs(self.max_rows),
            **{"queue_limit": 10_000} | self.limits,
        )
        self.scheduler = scheduler
        self.executor = FakeExecutor(self.clock, self.iteration_s)
        self.loop = StepLoop(scheduler, self.executor, self.record, self.clock)

    @property
    def now(self):
        """Seconds since the start."""
        return self.clock.now - START

    def iteration_s(self, plan):
        table = self.scheduler._table  # at the start of the iteration, after joins
        self.num_running, self.num_waiting = self.scheduler.num_running, self.scheduler.num_waiting
        self.calls_left = {image: each.request.num_calls - each.call for image, each in table.running.items()}
        steps_s = decode_s = 0.0
        if plan.steps:
            first = self.submitted[plan.steps[0].image.attempt_id]
            rows = sum(self.submitted[step.image.attempt_id].rows for step in plan.steps)
            steps_s = self.truth.step_s(batch_key(first.side_px), rows)
        if plan.decodes:
            first = self.submitted[plan.decodes[0].image.attempt_id]
            decode_s = self.truth.decode_s(batch_key(first.side_px), len(plan.decodes))
        return steps_s + decode_s

    def record(self, event):
        name = event.prepared.request.attempt_id
        if isinstance(event, RequestEnded):
            assert name not in self.finish_reasons
            self.finish_reasons[name], self.ended_at[name] = event.event.finish_reason, self.now
        elif isinstance(event, ProgressChanged):
            self.predicted.setdefault(name, event.progress)

    def submit(self, request, name=None):
        name = name or f"r{len(self.submitted)}"
        self.submitted[name], self.arrived[name] = request, self.now
        self.loop.submit(self.executor.prepare(request.image_request(name)))
        return name

    def run(self, traffic=(), check=lambda _plan: None):
        """Run until all of `traffic` has ended."""
        upcoming = sorted(traffic, key=lambda request: request.at_s)
        while True:
            while upcoming and START + upcoming[0].at_s <= self.clock.now:
                self.submit(upcoming.pop(0))
            iteration = self.loop.run_iteration()
            if iteration is not None:
                check(iteration.plan)
            elif upcoming:
                self.clock.now = START + upcoming[0].at_s
            else:
                return


def with_weight(request):
    """Return a request with its client's weight."""
    return replace(request, weight=0.5 if request.client == "b" else 1.0)


priorities = st.sampled_from(["low", "normal", "high"])
traffic_requests = st.builds(
    TrafficRequest,
    at_s=st.floats(0, 2.0),
    steps=st.integers(1, 20),
    images=st.integers(1, 4),
    side_px=st.sampled_from(SIDES),
    rows=st.integers(1, 2),
    priority=priorities,
    deadline_s=st.none() | st.floats(0.01, 3.0),
)


@every_policy
@in_virtual_time
@given(traffic=st.lists(traffic_requests, max_size=25), num_slots=st.integers(1, 6), max_rows=st.integers(1, 8))
def test_no_slot_and_no_row_stays_unused_while_an_image_could_use_it(policy, traffic, num_slots, max_rows):
    """No iteration is empty; no slot is free while an image waits; a call has as many images as it may.

    It has all images of its batch key, or no more of them would pay off, or, while slots are free, a larger call could
    miss a deadline (`scheduling/step/batch_selection.py`).
    """
    simulation = Simulation(policy, num_slots, max_rows)

    def check(plan):
        assert plan.steps or plan.decodes
        assert simulation.num_running == num_slots or not simulation.num_waiting
        if not plan.steps:
            return
        side_px = simulation.submitted[plan.steps[0].image.attempt_id].side_px
        stepped = {step.image for step in plan.steps}
        if simulation.num_running < num_slots and any(
            simulation.submitted[image.attempt_id].deadline_s is not None for image in stepped
        ):
            return
        rows_left = max_rows - sum(simulation.submitted[image.attempt_id].rows for image in stepped)
        for image, calls_left in simulation.calls_left.items():
            request = simulation.submitted[image.attempt_id]
            if image not in stepped and request.side_px == side_px and calls_left:
                assert request.rows > rows_left, "it would have paid off"

    simulation.run(traffic, check)
    assert len(simulation.finish_reasons) == len(traffic)


# What each policy ranks ahead of a waiting request, for ever: newer work with a deadline and high priority, older work,
# or shorter work.
PREFERRED = {
    "fair": TrafficRequest(steps=3, priority="high", deadline_s=0.5),
    "least-slack": TrafficRequest(steps=3, priority="high", deadline_s=0.5),
    "fcfs": TrafficRequest(steps=3),
    "shortest-first": TrafficRequest(steps=1, rows=1),
}


@every_policy
@settings(max_examples=2, deadline=None)
@given(
    patient=st.builds(
        TrafficRequest,
        steps=st.integers(1, 40),
        images=st.integers(1, 3),
        side_px=st.sampled_from(SIDES),
        rows=st.integers(1, 2),
        priority=st.just("high"),  # with the nearest implicit deadline: others take longer to test
        exclusive=st.booleans(),
    ),
    num_slots=st.integers(1, 3),
    max_rows=st.integers(1, 4),
)
def test_no_request_starves_under_an_endless_stream_of_preferred_ones(policy, patient, num_slots, max_rows):
    """New requests overtake a waiting one only until its sort key is below theirs; the policy determines when.

    fair (of one client), least-slack: the deadline of a new request is not before its arrival, and priority subtracts
    30 s, so none overtakes after the implicit deadline plus 30 s. fcfs: none ever does. shortest-first: none does after
    twice the request's own work, which in a full batch takes at most `steps` of the longest iterations. From then on
    only earlier requests go first: the queue is kept at `max_waiting` images, and the request has `images`; each takes
    at most its steps of the longest iteration and a decode, and three batch keys share the device.
    """
    simulation, max_waiting = Simulation(policy, num_slots, max_rows), 6
    preferred = PREFERRED[policy]
    for _ in range(max_waiting):
        simulation.submit(preferred)
    name = simulation.submit(patient)
    own_s = patient.images * (patient.steps * ITERATION_S + DECODE_S)
    overtaken_s = {
        "fair": IMPLICIT_DEADLINE_S[patient.priority] + 30.0,
        "least-slack": IMPLICIT_DEADLINE_S[patient.priority] + 30.0,
        "fcfs": 0.0,
        "shortest-first": 2 * own_s,
    }[policy]
    others_s = (max_waiting + num_slots) * (preferred.steps * ITERATION_S + DECODE_S)
    bound_s = overtaken_s + 3 * (own_s + others_s) + 0.5 + ITERATION_S + DECODE_S
    while name not in simulation.finish_reasons:
        while simulation.scheduler.num_waiting < max_waiting:
            if simulation.submit(preferred) in simulation.finish_reasons:
                break  # rejected: it could not meet its deadline
        simulation.loop.run_iteration()
        assert simulation.now <= bound_s, "starved"
    assert simulation.finish_reasons[name] is FinishReason.FINISHED


requests_of_one_key = st.builds(
    TrafficRequest,
    at_s=st.floats(0, 0.5),
    steps=st.integers(1, 12),
    images=st.integers(1, 3),
    rows=st.just(2),
    priority=priorities,
    deadline_s=st.none() | st.floats(0.02, 1.5),
    client=st.sampled_from(["", "a", "b"]),
)


@pytest.mark.parametrize("policy", ["fair", "least-slack", "fcfs"])
@settings(max_examples=examples(16), deadline=None)
@given(traffic=st.lists(requests_of_one_key, max_size=14), num_slots=st.integers(1, 6))
def test_with_exact_costs_an_accepted_deadline_is_always_met(policy, traffic, num_slots):
    """Requests have one batch key, one image per call, with and without deadlines, and arrive at any time.

    The simulation at admission is exact, and later
    requests are rejected or deprioritized if they would break an accepted deadline; so only rounding can break one.
    """
    simulation = Simulation(policy, num_slots, max_rows=2)
    simulation.run(traffic)
    for name, finish_reason in simulation.finish_reasons.items():
        assert finish_reason in (FinishReason.FINISHED, FinishReason.UNMEETABLE), simulation.submitted[name]
        if finish_reason is FinishReason.FINISHED and (deadline_s := simulation.submitted[name].deadline_s) is not None:
            assert simulation.ended_at[name] <= simulation.arrived[name] + deadline_s + 1e-6


@settings(max_examples=examples(16), deadline=None)
@given(works=st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 0.5)), min_size=1, max_size=8), data=st.data())
def test_least_slack_accepts_and_meets_every_feasible_set_of_deadlines(works, data):
    """Requests that arrive at one instant, one image per call, a slot for each.

    If any order meets all deadlines, the order of deadlines does (Jackson, 1955): each set here is feasible in that
    order, with a microsecond to spare for rounding, and arrives in any order.
    """
    costs, elapsed_s, feasible = exact_costs(2), 0.0, []
    deadline_s = 0.0
    for steps, spare_s in works:
        elapsed_s += steps * costs.step_s(batch_key(8), 2) + costs.decode_s(batch_key(8))
        deadline_s = max(deadline_s, elapsed_s + 1e-6) + spare_s
        feasible.append(TrafficRequest(steps=steps, deadline_s=deadline_s))
    simulation = Simulation(num_slots=len(works), max_rows=2)
    simulation.run(data.draw(st.permutations(feasible)))
    assert set(simulation.finish_reasons.values()) == {FinishReason.FINISHED}
    assert all(simulation.ended_at[name] <= request.deadline_s for name, request in simulation.submitted.items())


def test_a_request_without_a_deadline_goes_behind_deadlines_it_would_break():
    simulation = Simulation(num_slots=2, max_rows=2)
    with_deadline = simulation.submit(TrafficRequest(steps=600, deadline_s=7.0))
    without_deadline = simulation.submit(TrafficRequest(steps=100, priority="high"))
    simulation.run()
    assert simulation.finish_reasons == {with_deadline: FinishReason.FINISHED, without_deadline: FinishReason.FINISHED}
    assert simulation.ended_at[without_deadline] > simulation.ended_at[with_deadline]


def test_rounding_does_not_undo_a_deprioritization():
    simulation = Simulation(num_slots=1, max_rows=2)
    for request in [TrafficRequest(steps=12, images=3, priority="high")] * 2 + [
        TrafficRequest(steps=1, priority="low", deadline_s=0.95)
    ]:
        simulation.submit(request)
    simulation.clock.now += 0.1
    deprioritized = simulation.submit(TrafficRequest(steps=8, images=9, priority="high"))
    simulation.run()
    assert simulation.finish_reasons["r2"] is FinishReason.FINISHED
    assert simulation.ended_at[deprioritized] > simulation.ended_at["r2"]


def test_a_request_without_a_deadline_goes_by_its_implicit_one_if_that_breaks_no_other():
    simulation = Simulation(num_slots=2, max_rows=2)
    with_deadline = simulation.submit(TrafficRequest(steps=600, deadline_s=9.0))
    without_deadline = simulation.submit(TrafficRequest(steps=100, priority="high"))
    simulation.run()
    assert simulation.ended_at[without_deadline] < simulation.ended_at[with_deadline] <= 9.0


@pytest.mark.parametrize("policy", ["fair", "least-slack", "fcfs"])
@settings(max_examples=examples(16), deadline=None)
@given(
    traffic=st.lists(
        st.builds(
            TrafficRequest,
            steps=st.integers(1, 15),
            images=st.integers(1, 4),
            rows=st.integers(1, 2),
            client=st.sampled_from(["", "a", "b"]),
        ).map(with_weight),
        min_size=1,
        max_size=8,  # so that all images are in the head of the queue
    ),
    num_slots=st.integers(1, 6),
    max_rows=st.integers(1, 8),
)
def test_forecasts_of_one_batch_key_come_true(policy, traffic, num_slots, max_rows):
    """Exact costs, no further arrivals: the forecast joins, steps and decodes by the scheduler's rules.

    So it is off by at most one iteration and one decode, when two images are denoised at once and are not decoded in
    the order in which they joined; with fair shares by one for each client and one more, since whose images are left
    decides how wide the calls are.
    """
    simulation = Simulation(policy, num_slots, max_rows)
    names = [simulation.submit(request) for request in traffic]
    predicted = simulation.scheduler.progress(names, simulation.clock.now)
    simulation.run()
    num_off = len({request.client for request in traffic}) + 1 if policy == "fair" else 1
    off_s = num_off * (STEPS[8] + DECODES[4])
    for name in names:
        assert abs(simulation.ended_at[name] - predicted[name].finish_in_s) <= off_s


@pytest.mark.parametrize("policy", ["fair", "least-slack"])
def test_nearly_all_forecasts_come_true_where_images_take_the_slots_of_others(policy):
    """The same bound holds for what is left when more requests arrive, without what was learned of traffic before.

    With several clients, whose images are left decides how wide the calls are: a few forecasts are off by more.
    """
    rng, off = random.Random(1), []

    def some_requests():
        return [
            with_weight(
                TrafficRequest(
                    steps=rng.randint(1, 15),
                    images=rng.randint(1, 3),
                    priority=rng.choice(["low", "normal", "high"]),
                    client=rng.choice(["", "a", "b"]),
                )
            )
            for _ in range(rng.randint(1, 6))
        ]

    for _ in range(60):
        simulation = Simulation(policy, num_slots=rng.randint(1, 6), max_rows=rng.randint(2, 8))
        running, arriving = some_requests(), some_requests()
        for request in running:
            simulation.submit(request)
        for _ in range(rng.randint(0, 20)):
            simulation.loop.run_iteration()
        names = [simulation.submit(request) for request in arriving]
        names += [name for name in simulation.submitted if name not in {*names, *simulation.finish_reasons}]
        now, predictor = simulation.now, simulation.scheduler._predictor
        predictor._expected_batch_size.clear()
        predictor.table.bump_version()
        predicted = {name: predictor.predict_uncorrected(name, simulation.clock.now) for name in names}
        simulation.run()
        num_clients = len({request.client for request in (*running, *arriving)}) if policy == "fair" else 1
        off += [
            abs(simulation.ended_at[name] - now - predicted[name].finish_in_s) / (num_clients * (STEPS[8] + DECODES[4]))
            for name in names
        ]
    assert np.mean(np.array(off) > 1) <= (0.02 if policy == "fair" else 0)
    assert np.mean(off) <= 0.05


@pytest.mark.parametrize("policy", ["fair", "least-slack"])
@in_virtual_time
@given(
    running=st.lists(
        st.builds(
            TrafficRequest,
            steps=st.integers(5, 200),
            images=st.integers(1, 4),
            side_px=st.sampled_from(SIDES),
            client=st.sampled_from(["", "a", "b"]),
            weight=st.sampled_from([1.0, 0.5]),
        ),
        max_size=10,
    ),
    num_iterations=st.integers(0, 20),
    num_slots=st.integers(1, 6),
    max_rows=st.integers(2, 8),
)
def test_an_urgent_request_waits_for_at_most_one_iteration(policy, running, num_iterations, num_slots, max_rows):
    """However many images others have in slots, of whatever size, and whatever is left of them."""
    simulation = Simulation(policy, num_slots, max_rows)
    for request in running:
        simulation.submit(request)
    for _ in range(num_iterations):
        simulation.loop.run_iteration()
    simulation.loop.run_iteration()  # the one that it waits for
    name = simulation.submit(TrafficRequest(steps=1, priority="high", client="c"))
    stepped = simulation.loop.run_iteration().plan.steps
    assert name in {step.image.attempt_id for step in stepped}


@every_policy
@settings(max_examples=examples(12), deadline=None)
@given(
    traffic=st.lists(
        st.builds(TrafficRequest, steps=st.integers(1, 15), rows=st.integers(1, 2), side_px=st.sampled_from(SIDES)),
        min_size=1,
        max_size=10,
    )
)
def test_forecasts_of_several_batch_keys_come_true_within_the_bounds_of_sharing(policy, traffic):
    """All images have slots.

    In the forecast, batch keys share the device continuously; the device may be half a second and one iteration of each
    key behind that (`stride.py`), for each key that finishes or remains alone, and each image's decode is an iteration
    of its own.
    """
    simulation = Simulation(policy, num_slots=10)
    names = [simulation.submit(request) for request in traffic]
    predicted = simulation.scheduler.progress(names, simulation.clock.now)
    simulation.run()
    num_keys = len({request.side_px for request in traffic})
    off_s = (0.5 + num_keys * ITERATION_S) * (num_keys - 1) + len(traffic) * DECODE_S + ITERATION_S
    for name in names:
        assert abs(simulation.ended_at[name] - predicted[name].finish_in_s) <= off_s
