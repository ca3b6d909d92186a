"""Forecasts the start and finish of every image by simulating the scheduler on the cost model.

Between two departures only the cursors change, so the simulation jumps from one to the next: each jump ends when the
next image is denoised; its slot goes to the first image in the queue. Images join, step and decode by the scheduler's
own rules; so with exact costs, one batch key, a policy with a stable order and no further arrivals, the forecast is
exact. Future arrivals are unknown; `expected_batch_size` stands in for them: a step is assumed to have at least that
many rows, the current average, even after the known images leave.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.scheduling.costs import CostModel
from noria.scheduling.shares.fair_width import ReadyImages, add_image, fair_counts, remove_image
from noria.scheduling.shares.stride import kind_of
from noria.scheduling.step.batch_selection import BatchLimits, all_fit, can_encode, select_batch
from noria.scheduling.types import BatchKey, ItemId


@dataclass(slots=True, eq=False)
class SimulatedImage:
    """An image of the simulation."""

    image: ItemId
    batch_key: BatchKey
    rows: int
    calls_left: float  # calls of all stages
    running: bool = False
    exclusive: bool = False
    deadline_s: float | None = None  # seconds from now; None: no deadline
    largest_key: BatchKey | None = None  # key of the largest size in its calls; None: `batch_key`
    needs_encode: bool = False  # whether its request's start image is encoded when it joins
    call_work_s: float = 0.0  # device time of a call in full batches, its share of the decode included, if known
    later_stages: tuple[tuple[BatchKey, int], ...] = ()  # keys and calls of the stages after the present one
    later_calls: float = field(init=False, default=0.0)  # those of all of them, in `calls_left`
    client: str = ""
    weight: float = 1.0  # weight of its client's share
    is_evictable: bool = False  # whether an image that precedes it may take its slot
    is_begun: bool = False  # whether its prompt is encoded
    rank: int = 0  # in the policy's order; set by `forecast`
    start_s: float = 0.0  # seconds from now; set by `forecast`

    def __post_init__(self) -> None:
        if self.later_stages:
            self.later_calls = sum([num_calls for _, num_calls in self.later_stages])


class Forecast(NamedTuple):
    """Predicted start and finish, in seconds from now."""

    start_in_s: float
    finish_in_s: float


def forecast(
    in_order: Sequence[SimulatedImage],
    num_slots: int,
    costs: CostModel,
    expected_batch_size: Mapping[BatchKey, float],
    decode_batch: int = 4,
    width_slack: float = math.inf,
    num_evictable: float = math.inf,
) -> dict[ItemId, Forecast]:
    """Predict the start and finish of all images, running and waiting, given in the policy's order.

    Modifies the images.

    Free slots are filled at once, except by images whose start images are encoded later. An image finishes when its
    decode ends. Each decode and each encoding delays all images. `num_evictable` images can be evicted at first, and
    one more with each evicted one that returns.
    """
    simulation = _Simulation(num_slots, costs, expected_batch_size, decode_batch, width_slack, num_evictable)
    simulation.start(in_order)
    while simulation.num_running or simulation.queue:
        simulation.advance()
    return simulation.done


class HeadForecast(NamedTuple):
    """A forecast of the head of a queue; the simulation ends when a slot is free for the first image behind it."""

    images: dict[ItemId, Forecast]
    end_in_s: float  # end of the simulation, from now
    pace: float  # seconds of the simulation per second of `call_work_s`


def forecast_head(
    in_order: Sequence[SimulatedImage],
    num_slots: int,
    costs: CostModel,
    expected_batch_size: Mapping[BatchKey, float],
    decode_batch: int = 4,
    width_slack: float = math.inf,
    num_evictable: float = math.inf,
) -> HeadForecast:
    """Forecast a queue that is longer than `in_order`, as `forecast` does.

    Images that run at the end are assumed to share the device equally from then on, at the pace of the simulation.
    """
    simulation = _Simulation(num_slots, costs, expected_batch_size, decode_batch, width_slack, num_evictable)
    work_s = sum([each.calls_left * each.call_work_s for each in in_order])
    simulation.start(in_order)
    while simulation.queue or simulation.num_running >= num_slots:
        simulation.advance()
    unfinished = [each for each in in_order if each.image not in simulation.done]
    work_s -= sum([each.calls_left * each.call_work_s for each in unfinished])
    pace = simulation.now / work_s if work_s > 0.0 else costs.slowdown
    for each in unfinished:
        left_s = pace * num_slots * each.calls_left * each.call_work_s
        simulation.done[each.image] = Forecast(each.start_s, simulation.now + left_s)
    return HeadForecast(simulation.done, simulation.now, pace)


@dataclass(slots=True)
class _KeyGroup:
    """The running images that share calls and have calls left, by rank, and those of them that step."""

    batch_key: BatchKey  # the key of the largest size
    kind: int  # equal for keys that differ only in the version of the model
    max_rows: int  # rows of a call
    expected_rows: int  # rows of a call at present, at most `max_rows`
    decode_s: float  # seconds of one image
    width_slack: float  # as `BatchLimits` has it
    images: list[SimulatedImage] = field(default_factory=list)
    ready: ReadyImages = field(default_factory=dict)  # whose they are, if clients share the device
    stepping: list[SimulatedImage] = field(default_factory=list)
    is_stale: bool = True  # images joined or left since `select`
    step_s: float = 0.0
    min_calls_left: float = 0.0  # until the next image is denoised, or in its next stage
    _step_s_by_rows: dict[int, float] = field(default_factory=dict)  # a cache

    def select(self, costs: CostModel, now: float, share: float, *, is_full: bool) -> None:
        """Select the stepping images and the duration of a step: at the expected batch size, if deadlines allow."""

        def step_s(rows: int) -> float:
            if rows not in self._step_s_by_rows:
                self._step_s_by_rows[rows] = costs.step_s(self.batch_key, rows)
            return self._step_s_by_rows[rows]

        ready = self.ready or None
        rows = sum([each.rows for each in self.images])
        max_rows = costs.stretched_limit(self.batch_key, self.max_rows, rows)
        if all_fit(rows, max_rows, ready, is_full=is_full):
            self.stepping, max_step_s = self.images[:], math.inf
        else:
            limits = BatchLimits(max_rows, step_s, self.decode_s, share, is_full, self.width_slack)
            self.stepping, max_step_s = select_batch(self.images, limits, now, ready)
        known_s = step_s(sum([each.rows for each in self.stepping]))
        self.step_s = max(known_s, min(step_s(self.expected_rows), max_step_s)) if self.expected_rows else known_s
        self.min_calls_left = min([each.calls_left - each.later_calls for each in self.stepping])
        self.is_stale = False

    def advance(self, calls: float) -> list[SimulatedImage]:
        """Advance the stepping images by `calls` calls; return those that leave the group then."""
        self.min_calls_left -= calls
        for each in self.stepping:
            each.calls_left -= calls
        if self.min_calls_left >= 0.5:
            return []
        leaving = [each for each in self.stepping if each.calls_left - each.later_calls < 0.5]
        for each in leaving:
            self.images.remove(each)
            if self.ready:
                remove_image(self.ready, each)
        self.is_stale = True
        return leaving


@dataclass(slots=True)
class _Simulation:
    num_slots: int
    costs: CostModel
    expected_batch_size: Mapping[BatchKey, float]
    decode_batch: int
    width_slack: float
    num_evictable: float  # images that can be evicted now
    now: float = 0.0
    num_running: int = 0
    queue: deque[SimulatedImage] = field(default_factory=deque)
    groups: dict[BatchKey, _KeyGroup] = field(default_factory=dict)
    kinds: dict[BatchKey, int] = field(default_factory=dict)  # numbers of kinds
    denoised: list[SimulatedImage] = field(default_factory=list)  # not yet decoded
    exclusive_attempt_id: str | None = None  # attempt of the running exclusive request
    waits_to_evict: bool = False  # whether an image would have the slot of one behind it if more could be evicted
    has_postponed: bool = False  # whether images wait only because the last iteration encoded others' start images
    done: dict[ItemId, Forecast] = field(default_factory=dict)

    def start(self, in_order: Sequence[SimulatedImage]) -> None:
        """Let images run or wait, given in the policy's order."""
        for rank, each in enumerate(in_order):
            each.rank = rank
        self.evict(in_order)
        for each in in_order:
            if each.running:
                self.assign(each)
            else:
                self.queue.append(each)

    def evict(self, in_order: Sequence[SimulatedImage]) -> None:
        """Let running images wait that have slots of waiting ones; later, slots have the first images in order."""
        running = [each for each in in_order if each.running]
        num_free = self.num_slots - len(running)
        if num_free >= len(in_order) - len(running) or any(each.exclusive for each in running):
            return
        last = [each for each in running if each.is_evictable]
        for each in in_order:
            if each.running:
                continue
            if num_free > 0:
                num_free -= 1
            elif each.exclusive or not last or last[-1].rank < each.rank:
                return
            elif self.num_evictable <= 0:
                self.waits_to_evict = True
                return
            else:
                last.pop().running = False
                self.num_evictable -= 1

    def advance(self) -> None:
        """Fill the free slots, and advance to the next departure."""
        self.join()
        self.step()
        self.decode()

    def assign(self, each: SimulatedImage) -> None:
        """Give an image a slot at the current time."""
        each.start_s = self.now
        self.num_running += 1
        if each.exclusive:
            self.exclusive_attempt_id = each.image.attempt_id
        if each.calls_left <= 0:
            self._add_denoised(each)
        else:
            self._add_to_group(each)

    def _add_denoised(self, each: SimulatedImage) -> None:
        if each.batch_key.stage == 1:
            each.batch_key = each.batch_key._replace(stage=0)  # images are decoded together, whatever denoised them
        self.denoised.append(each)

    def _add_to_group(self, each: SimulatedImage) -> None:
        batch_key = each.largest_key or each.batch_key
        if batch_key not in self.groups:
            max_rows = self.costs.rows_limit(batch_key)
            self.groups[batch_key] = _KeyGroup(
                batch_key,
                self.kinds.setdefault(kind_of(batch_key), len(self.kinds)),
                max_rows,
                min(round(self.expected_batch_size.get(batch_key, 0.0)), max_rows),
                self.costs.decode_s(batch_key),
                self.width_slack,
            )
        group = self.groups[batch_key]
        insort(group.images, each, key=_rank)
        if self.width_slack < math.inf:
            add_image(group.ready, each)
        group.is_stale = True

    def join(self) -> None:
        """Fill free slots from the head of the queue; as many images wait as the scheduler lets wait for encoding."""
        text_encode_s, encodes, postponed = 0.0, list[BatchKey](), list[SimulatedImage]()
        while self.queue and (self.num_running < self.num_slots or self._evict_for(self.queue[0])):
            first = self.queue[0]
            if (
                self.num_running
                and (self.exclusive_attempt_id or first.exclusive)
                and self.exclusive_attempt_id != first.image.attempt_id
            ):
                break
            self.queue.popleft()
            if (postponed and any(each.image.attempt_id == first.image.attempt_id for each in postponed)) or (
                first.needs_encode and not can_encode(first.batch_key, encodes, self.decode_batch)
            ):
                postponed.append(first)
                continue
            if first.needs_encode:
                encodes.append(first.batch_key)
            self.assign(first)
            self.num_evictable += first.is_begun
            text_encode_s += 0.0 if first.is_begun else self.costs.text_encode_s(first.batch_key.model)
        self.queue.extendleft(reversed(postponed))
        self.has_postponed = bool(postponed)
        self.now += text_encode_s
        if encodes:
            self.now += self.costs.image_encode_s(encodes[0], len(encodes))

    def _evict_for(self, first: SimulatedImage) -> bool:
        """Let the last running image wait if `first` is ahead of it; return whether it does."""
        if not self.waits_to_evict or self.num_evictable <= 0 or first.exclusive:
            return False
        running = [each for group in self.groups.values() for each in group.images if each.is_evictable]
        last = max(running, key=_rank, default=first)
        if last.rank <= first.rank:
            return False
        group = self.groups[last.largest_key or last.batch_key]
        group.images.remove(last)
        if group.ready:
            remove_image(group.ready, last)
        group.is_stale = True
        insort(self.queue, last, key=_rank)
        self.num_running -= 1
        self.num_evictable -= 1
        return True

    def step(self) -> None:
        """Advance to the next departure, or by one iteration while images wait to be encoded or decoded."""
        groups = [group for group in self.groups.values() if group.images]
        if not groups:
            return
        shares = self._shares(groups)
        num_rows = sum([each.rows for group in groups for each in group.images])
        for group, share in zip(groups, shares, strict=True):
            if group.is_stale:
                is_full = self.num_running >= self.num_slots or num_rows > group.max_rows
                group.select(self.costs, self.now, share, is_full=is_full)
        iterations_s = _iterations_s(groups, shares)
        if self.denoised or self.has_postponed:
            jump_s = min(iterations_s)
        else:
            jump_s = min(
                [group.min_calls_left * iteration_s for group, iteration_s in zip(groups, iterations_s, strict=True)]
            )
        self.now += jump_s
        for group, iteration_s in zip(groups, iterations_s, strict=True):
            # With no measurements all costs are 0, and all images finish at once.
            leaving = group.advance(
                jump_s / iteration_s if iteration_s else max([each.calls_left for each in group.stepping])
            )
            for each in leaving:
                if each.later_stages:
                    (each.batch_key, num_calls), *later = each.later_stages
                    each.largest_key = None  # models with stages mix no sizes
                    each.calls_left, each.later_calls = each.later_calls, each.later_calls - num_calls
                    each.later_stages = tuple(later)
                    self._add_to_group(each)
                else:
                    self._add_denoised(each)

    def _shares(self, groups: Sequence[_KeyGroup]) -> list[float]:
        if len(groups) == 1:
            return [1.0]
        counts = [float(len(group.images)) for group in groups]
        if self.width_slack < math.inf:
            counts = fair_counts([group.ready for group in groups])
        num_images = sum(counts)
        return [count / num_images for count in counts]

    def decode(self) -> None:
        """Decode one batch of denoised images, which leave, if there are any."""
        if not self.denoised:
            return
        if len(self.denoised) == 1:
            departing, self.denoised = self.denoised, []
            self.now += self.costs.decode_s(departing[0].batch_key)
            self._depart(departing)
            return
        batch_key = self.denoised[0].batch_key.decode_key
        departing = [each for each in self.denoised if each.batch_key.decode_key == batch_key][: self.decode_batch]
        self.denoised = [each for each in self.denoised if each not in departing]
        self.now += self.costs.decode_s(batch_key, len(departing))
        self._depart(departing)

    def _depart(self, departing: Sequence[SimulatedImage]) -> None:
        for each in departing:
            self.done[each.image] = Forecast(each.start_s, self.now)
        self.num_running -= len(departing)
        if not self.num_running:
            self.exclusive_attempt_id = None


def _iterations_s(groups: Sequence[_KeyGroup], shares: Sequence[float]) -> list[float]:
    """Return the time from one step of each group to its next; `shares` are their parts of the device.

    Kinds share the device, so one with a small share takes longer. The groups of one kind take turns.
    """
    if len(groups) == 1:
        return [groups[0].step_s]
    turns_s, share_by_kind = dict[int, float](), dict[int, float]()
    for group, share in zip(groups, shares, strict=True):
        turns_s[group.kind] = turns_s.get(group.kind, 0.0) + group.step_s
        share_by_kind[group.kind] = share_by_kind.get(group.kind, 0.0) + share
    return [turns_s[group.kind] / share_by_kind[group.kind] for group in groups]


def _rank(each: SimulatedImage) -> int:
    return each.rank
