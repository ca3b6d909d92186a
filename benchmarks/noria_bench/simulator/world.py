"""The exact engine: each device runs the server's own scheduler, iteration by iteration, in virtual time.

Iterations take exactly what the cost model says. A request goes to the replica that the server's router ranks first
among `num_choices` chosen at random. If its device is lost, it starts again elsewhere, from its beginning: moving
images that run is not simulated. After the notice of an interruption, a device gets no more requests.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from noria.protocol.model_spec import ModelKey
from noria.scheduling.cluster.autoscaler import BacklogAutoscaler
from noria.scheduling.cluster.router import ReplicaLoad, rank_replicas
from noria.scheduling.policies import POLICIES
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import (
    BatchKey,
    FinishReason,
    IterationPlan,
    IterationResult,
    RequestFinished,
    SchedulableRequest,
)
from noria_bench.simulator.devices import Device
from noria_bench.simulator.outcome import Outcome
from noria_bench.simulator.workload import Arrival

_AUTOSCALE_S = 10.0  # between decisions, as Ray collects metrics
_CANARY = ModelKey(version="canary")
_ANY_MODEL = frozenset([ModelKey()])


@dataclass(frozen=True, slots=True)
class Settings:
    """A world, apart from its requests."""

    device: Device
    num_devices: int
    policy: str = "least-slack"
    fair_width_slack: float = 0.2  # as `engine.fair_width_slack`
    queue_limit: int = 256
    queue_limit_s: float = math.inf  # seconds of work ahead of a request that has to wait
    num_choices: int = 3
    autoscaler: BacklogAutoscaler | None = None
    mean_time_to_failure_s: float = math.inf  # mean for one device
    mean_time_to_interruption_s: float = math.inf  # mean for one spot device
    notice_s: float = 120.0  # before an interruption
    canary_share: float = 0.0  # share of requests that go to another version of the model, on the same devices
    seed: int = 0


class RequestSource(Protocol):
    """Clients that send requests in answer to others."""

    def on_steps(self, requests: Sequence[Arrival], at_s: float) -> None:
        """Take note of the requests of the images in a call that has ended."""
        ...

    def on_end(self, request: Arrival, latency_s: float | None, at_s: float) -> Arrival | None:
        """Return the next request, not before `at_s`; None: there is none. A latency of None: it was not served."""
        ...


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    scheduler: StepScheduler
    started_at: float
    is_ready: bool = False
    is_draining: bool = False
    is_gone: bool = False
    is_running: bool = False  # an iteration
    requests: dict[str, "_Request"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Request:
    name: str
    arrival: Arrival
    batch_key: BatchKey
    num_attempts: int = 0


def simulate(
    settings: Settings, arrivals: Iterable[Arrival], *, start_s: float = 0.0, source: RequestSource | None = None
) -> Outcome:
    """Run a world until all requests have ended: `arrivals`, in order, and those of `source`.

    Requests before `start_s` are not in the statistics.
    """
    return _World(settings, iter(arrivals), start_s, source).run()


class _World:
    def __init__(
        self, settings: Settings, arrivals: Iterator[Arrival], start_s: float, source: RequestSource | None
    ) -> None:
        self._settings, self._arrivals, self._start_s, self._source = settings, arrivals, start_s, source
        self._rng = random.Random(settings.seed)
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()
        self._replicas: dict[str, _Replica] = {}
        self._serving: list[_Replica] = []
        self._waiting: list[_Request] = []  # while no replica serves
        self._now, self._num_open = 0.0, 0  # requests that have not ended, and those that are about to arrive
        self._outcome = Outcome()

    def run(self) -> Outcome:
        for _ in range(self._settings.num_devices):
            self._start_replica(0.0)
        self._next_arrival()
        if self._settings.autoscaler is not None:
            self._at(_AUTOSCALE_S, "autoscale", None)
        handlers = {
            "arrive": self._arrive, "iterated": self._iterated, "ready": self._ready, "lost": self._lost,
            "notice": self._notice, "autoscale": self._autoscale,
        }  # fmt: skip
        while self._events and self._num_open:
            self._now, _, kind, subject = heapq.heappop(self._events)
            handlers[kind](subject)  # type: ignore[operator]
        for replica in self._replicas.values():
            self._end_replica(replica)
        self._outcome.duration_s = self._now
        return self._outcome

    def _at(self, at_s: float, kind: str, subject: object) -> None:
        if math.isfinite(at_s):
            heapq.heappush(self._events, (at_s, next(self._numbers), kind, subject))

    # Replicas.

    def _start_replica(self, cold_start_s: float) -> None:
        settings = self._settings
        costs = settings.device.costs()
        costs.add(costs.copy_as(ModelKey(), _CANARY))
        replica = _Replica(
            f"d{len(self._replicas)}",
            StepScheduler(
                settings.device.slots,
                settings.device.decode_batch,
                queue_limit=settings.queue_limit,
                queue_limit_s=settings.queue_limit_s,
                policy=POLICIES[settings.policy],
                fair_width_slack=settings.fair_width_slack,
                costs=costs,
            ),
            self._now,
        )
        self._replicas[replica.name] = replica
        self._at(self._now + cold_start_s, "ready", replica)
        for kind, mean_s in (
            ("lost", settings.mean_time_to_failure_s), ("notice", settings.mean_time_to_interruption_s)
        ):  # fmt: skip
            if math.isfinite(mean_s):
                self._at(self._now + cold_start_s + self._rng.expovariate(1.0 / mean_s), kind, replica)

    def _ready(self, replica: _Replica) -> None:
        if replica.is_gone:
            return
        replica.is_ready = True
        self._serving.append(replica)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._route(request)

    def _notice(self, replica: _Replica) -> None:
        """Announce that a spot device goes: a new one starts, and the old one gets no more requests."""
        if replica.is_gone or replica.is_draining:
            return
        replica.is_draining = True
        self._outcome.num_interruptions += 1
        self._start_replica(self._settings.device.cold_start_s)
        if replica in self._serving:
            self._serving.remove(replica)
        self._at(self._now + self._settings.notice_s, "lost", replica)

    def _lost(self, replica: _Replica) -> None:
        if replica.is_gone:
            return
        if not replica.is_draining:
            self._outcome.num_failures += 1
            self._start_replica(self._settings.device.cold_start_s)
        self._remove(replica)

    def _remove(self, replica: _Replica) -> None:
        self._end_replica(replica)
        replica.is_gone = True
        if replica in self._serving:
            self._serving.remove(replica)
        orphans, replica.requests = list(replica.requests.values()), {}
        for request in orphans:
            self._outcome.num_restarted += 1
            self._route(request)

    def _end_replica(self, replica: _Replica) -> None:
        if not replica.is_gone:
            self._outcome.device_s += self._now - replica.started_at

    def _autoscale(self, _: object) -> None:
        autoscaler = self._settings.autoscaler
        assert autoscaler is not None
        present = [each for each in self._replicas.values() if not each.is_gone and not each.is_draining]
        backlogs_s: dict[str, float | None] = {each.name: each.scheduler.backlog_s for each in self._serving}
        wanted = autoscaler.decide(backlogs_s, len(present), self._now)
        for _ in range(wanted - len(present)):
            self._start_replica(self._settings.device.cold_start_s)
        least_loaded = sorted(self._serving, key=lambda each: each.scheduler.backlog_s)
        for replica in least_loaded[: max(min(len(present) - wanted, len(self._serving) - 1), 0)]:
            replica.is_draining = True
            self._serving.remove(replica)
            if not replica.requests:
                self._remove(replica)
        self._outcome.max_devices = max(self._outcome.max_devices, wanted)
        self._at(self._now + _AUTOSCALE_S, "autoscale", None)

    # Requests.

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._num_open += 1
            self._at(arrival.at_s, "arrive", arrival)

    def _arrive(self, arrival: Arrival) -> None:
        model = _CANARY if self._rng.random() < self._settings.canary_share else ModelKey()
        batch_key = BatchKey(arrival.width_px, arrival.height_px, model)
        self._route(_Request(f"r{next(self._numbers)}", arrival, batch_key))
        self._next_arrival()

    def _route(self, request: _Request) -> None:
        if not self._serving:
            self._waiting.append(request)
            return
        num_choices = min(self._settings.num_choices, len(self._serving))
        choices = self._rng.sample(self._serving, num_choices)
        loads = [ReplicaLoad(each.name, _ANY_MODEL, each.scheduler.backlog_s) for each in choices]
        replica = self._replicas[rank_replicas(loads, ModelKey())[0]]
        request.num_attempts += 1
        arrival, attempt_id = request.arrival, f"{request.name}.{request.num_attempts}"
        deadline = None
        if arrival.deadline_s is not None:  # the engine's deadline, as the front end sets it
            deadline = arrival.at_s + arrival.deadline_s - self._settings.device.front_end_s
        schedulable = SchedulableRequest(
            attempt_id,
            request.batch_key,
            arrival.images,
            arrival.steps,
            deadline,
            deadline,
            arrival.rows,
            arrival.priority,  # type: ignore[arg-type]
            client=arrival.client,
            weight=arrival.weight,
        )
        replica.requests[attempt_id] = request
        self._handle(replica, replica.scheduler.submit(schedulable, self._now, arrival.at_s))
        if not replica.is_running:
            self._iterate(replica)

    def _iterate(self, replica: _Replica) -> None:
        self._handle(replica, replica.scheduler.expire(self._now))
        plan = replica.scheduler.plan(self._now)
        replica.is_running = plan is not None
        if plan is None:
            if replica.is_draining and not replica.requests:
                self._remove(replica)
            return
        self._at(self._now + self._iteration_s(replica, plan), "iterated", (replica, plan, self._now))

    def _iteration_s(self, replica: _Replica, plan: IterationPlan) -> float:
        costs, requests = replica.scheduler.costs, replica.requests
        seconds = (len(plan.joins) - len(plan.returns)) * costs.text_encode_s(ModelKey())
        if plan.steps:
            stepped = [requests[step.image.attempt_id] for step in plan.steps]
            seconds += costs.step_s(stepped[0].batch_key, sum(each.arrival.rows for each in stepped))
        if plan.decodes:
            batch_key = requests[plan.decodes[0].image.attempt_id].batch_key
            seconds += costs.decode_s(batch_key, len(plan.decodes))
        return seconds

    def _iterated(self, subject: tuple[_Replica, IterationPlan, float]) -> None:
        replica, plan, _ = subject
        if replica.is_gone:
            return
        if self._source is not None:
            stepped = [replica.requests[step.image.attempt_id].arrival for step in plan.steps]
            self._source.on_steps(stepped, self._now)
        # `is_timed` is False: costs are known, and stay so.
        self._handle(replica, replica.scheduler.commit(plan, IterationResult(is_timed=False), self._now))
        self._iterate(replica)

    def _handle(self, replica: _Replica, events: Iterable[object]) -> None:
        for event in events:
            if not isinstance(event, RequestFinished):
                continue
            request = replica.requests.pop(event.attempt_id)
            self._num_open -= 1
            latency_s = None
            if event.finish_reason is FinishReason.FINISHED:
                self._outcome.num_images += request.arrival.images
                latency_s = self._now - request.arrival.at_s + self._settings.device.front_end_s
            if self._source is not None and (following := self._source.on_end(request.arrival, latency_s, self._now)):
                self._num_open += 1
                self._at(following.at_s, "arrive", following)
            if request.arrival.at_s < self._start_s:
                continue
            if latency_s is not None:
                self._outcome.latencies_s.append(latency_s)
            else:
                self._outcome.unserved[event.finish_reason.value] += 1
