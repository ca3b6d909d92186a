"""When will it start, when will it be done: the wheel turned ahead on the cost model, from one departure to the next.

Between two departures nothing changes but the cursors, so the forecast jumps: each jump ends when the next image is drawn, gives its
slot to whoever is first in the queue, and goes on. What it cannot know is who is still to come; `company` stands for them: rows that
are usual at present, and that a step is therefore taken to have even when the known images leave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noria.scheduling.costs import CostModel
from noria.scheduling.plans import ImageId, ShapeClass


@dataclass(slots=True)
class Expected:
    """An image on its way, as the forecast moves it."""

    image: ImageId
    shape: ShapeClass
    rows: int
    calls_left: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now."""

    start_in_s: float
    finish_in_s: float


@dataclass(slots=True)
class _World:
    costs: CostModel
    company: Mapping[ShapeClass, float]
    decode_batch: int
    now: float = 0.0
    done: dict[ImageId, Forecast] = field(default_factory=dict)


def forecast(
    seated: Sequence[Expected],
    waiting: Sequence[Expected],
    num_slots: int,
    costs: CostModel,
    company: Mapping[ShapeClass, float],
    decode_batch: int = 4,
) -> dict[ImageId, Forecast]:
    """The start and finish of every image; both sequences in the order in which they go first. Consumes its arguments.

    The slots that `seated` leaves free are filled at once. An image's own decoding counts, and delays everybody.
    """
    world = _World(costs, company, decode_batch)
    aboard, queue = list(seated), list(reversed(waiting))
    starts = {each.image: 0.0 for each in aboard}
    while aboard or queue:
        while queue and len(aboard) < num_slots:
            boarding = queue.pop()
            starts[boarding.image] = world.now
            world.now += costs.prompt_s(boarding.shape.model)
            aboard.append(boarding)
        drawn = _jump(world, aboard)
        for each in drawn:
            aboard.remove(each)
            world.done[each.image] = Forecast(starts[each.image], world.now)
    return world.done


def _jump(world: _World, aboard: list[Expected]) -> list[Expected]:
    """Move time on to the next departure; returns who is drawn and decoded then."""
    by_shape: dict[ShapeClass, list[Expected]] = {}
    for each in aboard:
        by_shape.setdefault(each.shape, []).append(each)
    stepping = {shape: fitting(images, world.costs.rows_limit(shape)) for shape, images in by_shape.items()}
    # Shapes share the device in proportion to what they have seated, so a turn of one takes as long as its share is small.
    turn_s = {
        shape: _step_s(world, shape, images) * len(aboard) / len(by_shape[shape]) for shape, images in stepping.items()
    }
    until = min(image.calls_left * turn_s[shape] for shape, images in stepping.items() for image in images)
    drawn: list[Expected] = []
    for shape, images in stepping.items():
        # At no cost at all (nothing measured yet) everybody arrives at once.
        calls = until / turn_s[shape] if turn_s[shape] else max(image.calls_left for image in images)
        for image in images:
            image.calls_left -= calls
            if image.calls_left < 0.5:
                drawn.append(image)
    world.now += until
    for shape in by_shape:
        world.now += world.costs.decode_s(shape, min(world.decode_batch, sum(each.shape == shape for each in drawn)))
    return drawn


def fitting(images: Sequence[Expected], rows_limit: int) -> list[Expected]:
    """As many of `images`, in their order, as a call of `rows_limit` rows takes; one at least."""
    chosen: list[Expected] = []
    rows = 0
    for image in images:
        if chosen and rows + image.rows > rows_limit:
            break
        chosen.append(image)
        rows += image.rows
    return chosen


def _step_s(world: _World, shape: ShapeClass, images: Sequence[Expected]) -> float:
    limit = world.costs.rows_limit(shape)
    known = sum(image.rows for image in images)
    usual = min(round(world.company.get(shape, 0.0)), limit)
    return world.costs.step_s(shape, max(known, usual))
