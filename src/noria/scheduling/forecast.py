"""When will it start, when will it be done: the wheel turned ahead on the cost model, from one departure to the next.

Between two departures nothing changes but the cursors, so the forecast jumps: each jump ends when the next image is drawn, gives its
slot to whoever is first in the queue, and goes on. It boards, steps and decodes by the scheduler's own rules; so with exact costs, one
shape class, a policy whose order does not change and nobody to come, it is what will happen. What it cannot know is who is still to
come; `company` stands for them: rows that are usual at present, and that a step is therefore taken to have even when the known
images leave.
"""

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noria.scheduling.batches import Device, together
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import ImageId, ShapeClass


@dataclass(slots=True, eq=False)
class Expected:
    """An image on its way, as the forecast moves it."""

    image: ImageId
    shape: ShapeClass
    rows: int
    calls_left: float
    seated: bool = False
    alone: bool = False
    due_s: float | None = None  # seconds from now; None: whenever it is done
    place: int = 0  # in the policy's order; this and the next the forecast fills in
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now."""

    start_in_s: float
    finish_in_s: float


def forecast(
    in_order: Sequence[Expected],
    num_slots: int,
    costs: CostModel,
    company: Mapping[ShapeClass, float],
    decode_batch: int = 4,
) -> dict[ImageId, Forecast]:
    """The start and finish of every image; all of them, seated and waiting, in the order in which they go first. Consumes its arguments.

    The slots that are free are filled at once. An image's own decoding counts, and delays everybody.
    """
    world = _World(num_slots, costs, company, decode_batch)
    for place, each in enumerate(in_order):
        each.place = place
        if each.seated:
            world.seat(each)
        else:
            world.queue.append(each)
    while world.num_seated or world.queue:
        world.board()
        world.step()
        world.decode()
    return world.done


@dataclass(slots=True)
class _Lane:
    """The images of one shape class that have calls left, by their places, and those of them that step."""

    shape: ShapeClass
    limit: int  # rows of a call
    usual: int  # rows of a call at present, at most the limit
    aboard: list[Expected] = field(default_factory=list)
    stepping: list[Expected] = field(default_factory=list)
    changed: bool = True  # somebody came or left since `settle`
    step_s: float = 0.0
    soonest: float = 0.0  # calls until the next one is drawn
    _steps_s: dict[int, float] = field(default_factory=dict)  # by rows

    def settle(self, costs: CostModel, now: float, share: float, *, is_full: bool) -> None:
        """Say who steps, and what a step costs: with the usual company, as far as those who step can afford it."""

        def step_s(rows: int) -> float:
            if rows not in self._steps_s:
                self._steps_s[rows] = costs.step_s(self.shape, rows)
            return self._steps_s[rows]

        device = Device(self.limit, step_s, costs.decode_s(self.shape), share, is_full)
        self.stepping, longest_s = together(self.aboard, device, now)
        known_s = step_s(sum([each.rows for each in self.stepping]))
        self.step_s = max(known_s, min(step_s(self.usual), longest_s)) if self.usual else known_s
        self.soonest = min([each.calls_left for each in self.stepping])
        self.changed = False

    def advance(self, calls: float) -> list[Expected]:
        """Those who step do so; returns those who are drawn then."""
        self.soonest -= calls
        for each in self.stepping:
            each.calls_left -= calls
        if self.soonest >= 0.5:
            return []
        drawn = [each for each in self.stepping if each.calls_left < 0.5]
        for each in drawn:
            self.aboard.remove(each)
        self.changed = True
        return drawn


@dataclass(slots=True)
class _World:
    num_slots: int
    costs: CostModel
    company: Mapping[ShapeClass, float]
    decode_batch: int
    now: float = 0.0
    num_seated: int = 0
    queue: deque[Expected] = field(default_factory=deque)
    lanes: dict[ShapeClass, _Lane] = field(default_factory=dict)
    drawn: list[Expected] = field(default_factory=list)  # whose decoding is left
    flyer: str | None = None  # the request that shares the wheel with nobody
    done: dict[ImageId, Forecast] = field(default_factory=dict)

    def seat(self, each: Expected) -> None:
        """Give an image a slot, now."""
        each.start_s = self.now
        self.num_seated += 1
        if each.alone:
            self.flyer = each.image.request_id
        if each.calls_left <= 0:
            self.drawn.append(each)
            return
        if each.shape not in self.lanes:
            limit = self.costs.rows_limit(each.shape)
            self.lanes[each.shape] = _Lane(each.shape, limit, min(round(self.company.get(each.shape, 0.0)), limit))
        lane = self.lanes[each.shape]
        insort(lane.aboard, each, key=_place)
        lane.changed = True

    def board(self) -> None:
        """Fill the free slots from the head of the queue."""
        prompts_s = 0.0
        while self.queue and self.num_seated < self.num_slots:
            first = self.queue[0]
            if self.num_seated and (self.flyer or first.alone) and self.flyer != first.image.request_id:
                break
            self.seat(self.queue.popleft())
            prompts_s += self.costs.prompt_s(first.shape.model)
        self.now += prompts_s

    def step(self) -> None:
        """Move on to the next departure, or by one turn while somebody waits for the decoder."""
        lanes = [lane for lane in self.lanes.values() if lane.aboard]
        if not lanes:
            return
        num_aboard = 0
        for lane in lanes:
            num_aboard += len(lane.aboard)
        is_full = self.num_seated >= self.num_slots
        for lane in lanes:
            if lane.changed:
                lane.settle(self.costs, self.now, len(lane.aboard) / num_aboard, is_full=is_full)
        # Classes share the device in proportion to what they have seated, so a turn of one takes as long as its share is small.
        turns_s = [lane.step_s * num_aboard / len(lane.aboard) for lane in lanes]
        if self.drawn:
            until = min(turns_s)
        else:
            until = min([lane.soonest * turn_s for lane, turn_s in zip(lanes, turns_s, strict=True)])
        self.now += until
        for lane, turn_s in zip(lanes, turns_s, strict=True):
            # At no cost at all (nothing measured yet) everybody arrives at once.
            self.drawn += lane.advance(until / turn_s if turn_s else max([each.calls_left for each in lane.stepping]))

    def decode(self) -> None:
        """One batch of those that are drawn; they leave."""
        shape = self.drawn[0].shape
        leaving = [each for each in self.drawn if each.shape == shape][: self.decode_batch]
        self.drawn = [each for each in self.drawn if each not in leaving]
        self.now += self.costs.decode_s(shape, len(leaving))
        for each in leaving:
            self.done[each.image] = Forecast(each.start_s, self.now)
        self.num_seated -= len(leaving)
        if not self.num_seated:
            self.flyer = None


def _place(each: Expected) -> int:
    return each.place
