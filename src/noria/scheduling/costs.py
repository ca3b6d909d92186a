"""The cost model: how long a step, a decode and a prompt's encoding take, by size and by how many share the call.

Measured when the engine starts, refined at every turn, and kept from one start to the next. From it come the number of rows that pay
in one call (the knee), and, in `forecast.py`, when a request will start and finish. Pure: it is told what was measured.

Two clocks of change: the *pace*, one factor over all curves, follows within some twenty turns what troubles everything alike, such as a
neighbour on the same machine; a curve moves slowly, towards what the pace does not explain.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.scheduling.plans import ShapeClass

_PACE_WEIGHT = 0.08  # of one turn
_PACE_LASTS_S = 3.0  # without news of it, a pace fades: who is refused for it teaches nothing
_OFTEN = 50  # measurements of one count: their mean first, from then on a moving one
_TRIED = 3  # a count measured less often says nothing about the knee
_OUTLIER = 4.0  # a turn beyond this ratio counts as this: the first turn of a new kernel must not spoil what is known
_KNEE = 0.95  # a call of the knee's rows draws at least so much of the best throughput
_TRY_TURNS = (
    100  # after so many at the knee, a turn tries twice as many rows: nothing else could ever prove the knee wrong
)
_SETTLE_TURNS = 1000  # of one shape: the knee is found anew
_AREA_POWER = 1.1  # how a step's cost grows with the image's area: attention grows faster than convolution


@dataclass(slots=True)
class Curve:
    """Seconds by a count (rows of a call, images of a decode): straight lines between what was measured."""

    points: dict[int, float] = field(default_factory=dict)
    _counts: list[int] = field(init=False)  # sorted
    _seen: dict[int, int] = field(init=False)  # how often each was measured; what is given counts as often

    def __post_init__(self) -> None:
        self._counts = sorted(self.points)
        self._seen = dict.fromkeys(self.points, _OFTEN)

    def at(self, count: int) -> float:
        """Seconds at `count`: the nearest line, extended beyond the last point; 0 where nothing is known."""
        counts = self._counts
        if not counts:
            return 0.0
        if count in self.points:
            return self.points[count]
        if count < counts[0]:
            return self.points[counts[0]]
        if len(counts) == 1:
            return self.points[counts[0]] * count / counts[0]
        right = bisect_left(counts, count)
        if right == len(counts):
            # As the whole curve rises: of its last two points, either may have been disturbed.
            return max(self.points.values()) + self._slope(counts[0], counts[-1]) * (count - counts[-1])
        return self.points[counts[right - 1]] + self._slope(counts[right - 1], counts[right]) * (
            count - counts[right - 1]
        )

    def _slope(self, low: int, high: int) -> float:
        return max((self.points[high] - self.points[low]) / (high - low), 0.0)

    def observe(self, count: int, seconds: float) -> None:
        """Move towards what was just measured."""
        if known := self.at(count):
            seconds = min(max(seconds, known / _OUTLIER), known * _OUTLIER)
        if count not in self.points:
            insort(self._counts, count)
        seen = self._seen[count] = self._seen.get(count, 0) + 1
        before = self.points.setdefault(count, seconds)
        self.points[count] = before + (seconds - before) / min(seen, _OFTEN)

    def knee(self, most: int) -> int:
        """The smallest count, `most` at the highest, whose throughput is within 5 % of the best; `most` where nothing is known."""
        tried = [count for count in self._counts if self._seen[count] >= _TRIED]
        if not tried or tried[-1] < most:  # not measured far enough to say that more does not pay
            return most
        tried = [count for count in tried if count <= most] or [most]
        best = max(count / self.at(count) for count in tried)
        return next(count for count in tried if count / self.at(count) >= _KNEE * best)


@dataclass(slots=True)
class CostModel:
    """What was measured, by shape class; `most_rows` bounds what the knee may say."""

    most_rows: int = 64
    steps: dict[ShapeClass, Curve] = field(default_factory=dict)
    decodes: dict[ShapeClass, Curve] = field(default_factory=dict)
    encode_s: dict[str, float] = field(default_factory=dict)  # one prompt, by model
    pace: float = 1.0  # what turns take at present, over what the curves say
    _fitting: dict[ShapeClass, int] = field(default_factory=dict)  # rows that the memory was found to hold
    _turns: dict[ShapeClass, int] = field(default_factory=dict)  # planned
    _knees: dict[ShapeClass, int] = field(default_factory=dict)  # as of the last `settle`

    def step_s(self, shape: ShapeClass, rows: int) -> float:
        """One call of the model with `rows` rows, at the present pace."""
        return self.pace * self._curve_s(self.steps, shape, rows)

    def decode_s(self, shape: ShapeClass, images: int = 1) -> float:
        """Decoding `images` images together, at the present pace."""
        return self.pace * self._curve_s(self.decodes, shape, images) if images else 0.0

    def prompt_s(self, model: str) -> float:
        """Encoding one prompt, at the present pace."""
        return self.pace * self.encode_s.get(model, 0.0)

    def rows_limit(self, shape: ShapeClass) -> int:
        """How many rows a call of this shape should have at most: the knee, within the memory; at least 1."""
        return max(1, min(self._knees.get(shape, self.most_rows), self._fitting.get(shape, self.most_rows)))

    @property
    def longest_s(self) -> float:
        """The longest step or decode of all that was measured; 0 where nothing was."""
        curves = (*self.steps.values(), *self.decodes.values())
        return max((seconds for curve in curves for seconds in curve.points.values()), default=0.0)

    def rows_to_try(self, shape: ShapeClass) -> int:
        """As `rows_limit`, for the turn that is being planned; now and then more, within the memory, to learn whether that pays."""
        limit = self.rows_limit(shape)
        turns = self._turns[shape] = self._turns.get(shape, 0) + 1
        if turns % _SETTLE_TURNS == 0:
            self.settle()
        if turns % _TRY_TURNS:
            return limit
        return min(2 * limit, self._fitting.get(shape, self.most_rows), self.most_rows)

    def overflowed(self, shape: ShapeClass, rows: int) -> None:
        """A call of `rows` rows did not fit the memory: half as many from now on."""
        self._fitting[shape] = max(1, rows // 2)

    def observe_step(self, shape: ShapeClass, rows: int, seconds: float) -> None:
        """One call took so long."""
        curve = self.steps.setdefault(shape, Curve())
        if rows in curve.points:  # one that is new is no news of the pace
            ratio = min(max(seconds / curve.points[rows], 1 / _OUTLIER), _OUTLIER)
            self.pace += _PACE_WEIGHT * (ratio - self.pace)
        curve.observe(rows, seconds / self.pace)

    def observe_decode(self, shape: ShapeClass, images: int, seconds: float) -> None:
        """Decoding took so long."""
        self.decodes.setdefault(shape, Curve()).observe(images, seconds / self.pace)

    def observe_encode(self, model: str, prompts: int, seconds: float) -> None:
        """Encoding `prompts` prompts took so long, all together."""
        each = seconds / prompts / self.pace
        before = self.encode_s.setdefault(model, each)
        self.encode_s[model] = before + (each - before) / _OFTEN

    def take_the_quicker(self, other: "CostModel") -> None:
        """Of two measurements of the same, the quicker: nothing but a disturbance makes one slower."""
        for mine, others in ((self.steps, other.steps), (self.decodes, other.decodes)):
            for shape in mine.keys() & others.keys():
                points = {n: min(s, others[shape].points.get(n, s)) for n, s in mine[shape].points.items()}
                mine[shape] = Curve(points)
        self.encode_s |= {m: min(s, other.encode_s.get(m, s)) for m, s in self.encode_s.items()}

    def rest(self, seconds: float) -> None:
        """Nothing was measured for so long: what troubled everything may be over."""
        self.pace = 1.0 + (self.pace - 1.0) * math.exp(-max(seconds, 0.0) / _PACE_LASTS_S)

    def settle(self) -> None:
        """Find the knees anew; called when measuring is over, when nobody is here, and seldom otherwise, so that batches do not flutter."""
        self._knees = {shape: curve.knee(self.most_rows) for shape, curve in self.steps.items()}

    def _curve_s(self, curves: Mapping[ShapeClass, Curve], shape: ShapeClass, count: int) -> float:
        """From the shape's own curve, or from that of the nearest size of the same model; 0 where nothing is known."""
        if shape in curves:
            return curves[shape].at(count)
        alike = [other for other in curves if other.model == shape.model]
        if not alike:
            return 0.0
        nearest = min(alike, key=lambda other: abs(_area(other) - _area(shape)))
        return float(curves[nearest].at(count) * (_area(shape) / _area(nearest)) ** _AREA_POWER)


def _area(shape: ShapeClass) -> int:
    return shape.width_px * shape.height_px
