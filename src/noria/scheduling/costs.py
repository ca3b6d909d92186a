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

from noria.scheduling.types import BatchKey

_SLOWDOWN_WEIGHT = 0.08  # of one turn
_SLOWDOWN_DECAY_S = 3.0  # without news of it, a pace fades: who is refused for it teaches nothing
_AVERAGING_WINDOW = 50  # measurements of one count: their mean first, from then on a moving one
_MIN_MEASUREMENTS = 3  # a count measured less often says nothing about the knee
_MAX_OUTLIER_RATIO = (
    4.0  # a turn beyond this ratio counts as this: the first turn of a new kernel must not spoil what is known
)
_KNEE_THROUGHPUT = 0.95  # a call of the knee's rows draws at least so much of the best throughput
_EXPLORATION_INTERVAL = (
    100  # after so many at the knee, a turn tries twice as many rows: nothing else could ever prove the knee wrong
)
_KNEE_REFRESH_INTERVAL = 1000  # of one shape: the knee is found anew
_AREA_EXPONENT = 1.1  # how a step's cost grows with the image's area: attention grows faster than convolution


@dataclass(slots=True)
class CostCurve:
    """Seconds by a count (rows of a call, images of a decode): straight lines between what was measured."""

    points: dict[int, float] = field(default_factory=dict)
    _counts: list[int] = field(init=False)  # sorted
    _num_measurements: dict[int, int] = field(init=False)  # how often each was measured; what is given counts as often

    def __post_init__(self) -> None:
        self._counts = sorted(self.points)
        self._num_measurements = dict.fromkeys(self.points, _AVERAGING_WINDOW)

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
            seconds = min(max(seconds, known / _MAX_OUTLIER_RATIO), known * _MAX_OUTLIER_RATIO)
        if count not in self.points:
            insort(self._counts, count)
        num_measurements = self._num_measurements[count] = self._num_measurements.get(count, 0) + 1
        before = self.points.setdefault(count, seconds)
        self.points[count] = before + (seconds - before) / min(num_measurements, _AVERAGING_WINDOW)

    def knee(self, max_count: int) -> int:
        """The smallest count, `most` at the highest, whose throughput is within 5 % of the best; `most` where nothing is known."""
        measured = [count for count in self._counts if self._num_measurements[count] >= _MIN_MEASUREMENTS]
        if not measured or measured[-1] < max_count:  # not measured far enough to say that more does not pay
            return max_count
        measured = [count for count in measured if count <= max_count] or [max_count]
        best = max(count / self.at(count) for count in measured)
        return next(count for count in measured if count / self.at(count) >= _KNEE_THROUGHPUT * best)


@dataclass(slots=True)
class CostModel:
    """What was measured, by shape class; `most_rows` bounds what the knee may say."""

    max_rows: int = 64
    steps: dict[BatchKey, CostCurve] = field(default_factory=dict)
    decodes: dict[BatchKey, CostCurve] = field(default_factory=dict)
    text_encode_s_by_model: dict[str, float] = field(default_factory=dict)  # one prompt, by model
    slowdown: float = 1.0  # what turns take at present, over what the curves say
    _memory_limits: dict[BatchKey, int] = field(default_factory=dict)  # rows that the memory was found to hold
    _num_iterations: dict[BatchKey, int] = field(default_factory=dict)  # planned
    _knees: dict[BatchKey, int] = field(default_factory=dict)  # as of the last `settle`

    def step_s(self, batch_key: BatchKey, rows: int) -> float:
        """One call of the model with `rows` rows, at the present pace."""
        return self.slowdown * self._curve_s(self.steps, batch_key, rows)

    def decode_s(self, batch_key: BatchKey, images: int = 1) -> float:
        """Decoding `images` images together, at the present pace."""
        return self.slowdown * self._curve_s(self.decodes, batch_key, images) if images else 0.0

    def text_encode_s(self, model: str) -> float:
        """Encoding one prompt, at the present pace."""
        return self.slowdown * self.text_encode_s_by_model.get(model, 0.0)

    def rows_limit(self, batch_key: BatchKey) -> int:
        """How many rows a call of this shape should have at most: the knee, within the memory; at least 1."""
        return max(1, min(self._knees.get(batch_key, self.max_rows), self._memory_limits.get(batch_key, self.max_rows)))

    @property
    def longest_s(self) -> float:
        """The longest step or decode of all that was measured; 0 where nothing was."""
        curves = (*self.steps.values(), *self.decodes.values())
        return max((seconds for curve in curves for seconds in curve.points.values()), default=0.0)

    def exploration_limit(self, batch_key: BatchKey) -> int:
        """As `rows_limit`, for the turn that is being planned; now and then more, within the memory, to learn whether that pays."""
        limit = self.rows_limit(batch_key)
        num_iterations = self._num_iterations[batch_key] = self._num_iterations.get(batch_key, 0) + 1
        if num_iterations % _KNEE_REFRESH_INTERVAL == 0:
            self.refresh_knees()
        if num_iterations % _EXPLORATION_INTERVAL:
            return limit
        return min(2 * limit, self._memory_limits.get(batch_key, self.max_rows), self.max_rows)

    def record_oom(self, batch_key: BatchKey, rows: int) -> None:
        """A call of `rows` rows did not fit the memory: half as many from now on."""
        self._memory_limits[batch_key] = max(1, rows // 2)

    def observe_step(self, batch_key: BatchKey, rows: int, seconds: float) -> None:
        """One call took so long."""
        curve = self.steps.setdefault(batch_key, CostCurve())
        if rows in curve.points:  # one that is new is no news of the pace
            ratio = min(max(seconds / curve.points[rows], 1 / _MAX_OUTLIER_RATIO), _MAX_OUTLIER_RATIO)
            self.slowdown += _SLOWDOWN_WEIGHT * (ratio - self.slowdown)
        curve.observe(rows, seconds / self.slowdown)

    def observe_decode(self, batch_key: BatchKey, images: int, seconds: float) -> None:
        """Decoding took so long."""
        self.decodes.setdefault(batch_key, CostCurve()).observe(images, seconds / self.slowdown)

    def observe_text_encode(self, model: str, prompts: int, seconds: float) -> None:
        """Encoding `prompts` prompts took so long, all together."""
        each = seconds / prompts / self.slowdown
        before = self.text_encode_s_by_model.setdefault(model, each)
        self.text_encode_s_by_model[model] = before + (each - before) / _AVERAGING_WINDOW

    def merge_min(self, other: "CostModel") -> None:
        """Of two measurements of the same, the quicker: nothing but a disturbance makes one slower."""
        for mine, others in ((self.steps, other.steps), (self.decodes, other.decodes)):
            for batch_key in mine.keys() & others.keys():
                points = {n: min(s, others[batch_key].points.get(n, s)) for n, s in mine[batch_key].points.items()}
                mine[batch_key] = CostCurve(points)
        self.text_encode_s_by_model |= {
            m: min(s, other.text_encode_s_by_model.get(m, s)) for m, s in self.text_encode_s_by_model.items()
        }

    def decay_slowdown(self, seconds: float) -> None:
        """Nothing was measured for so long: what troubled everything may be over."""
        self.slowdown = 1.0 + (self.slowdown - 1.0) * math.exp(-max(seconds, 0.0) / _SLOWDOWN_DECAY_S)

    def refresh_knees(self) -> None:
        """Find the knees anew; called when measuring is over, when nobody is here, and seldom otherwise, so that batches do not flutter."""
        self._knees = {batch_key: curve.knee(self.max_rows) for batch_key, curve in self.steps.items()}

    def _curve_s(self, curves: Mapping[BatchKey, CostCurve], batch_key: BatchKey, count: int) -> float:
        """From the shape's own curve, or from that of the nearest size of the same model; 0 where nothing is known."""
        if batch_key in curves:
            return curves[batch_key].at(count)
        same_model = [other for other in curves if other.model == batch_key.model]
        if not same_model:
            return 0.0
        nearest = min(same_model, key=lambda other: abs(_area(other) - _area(batch_key)))
        return float(curves[nearest].at(count) * (_area(batch_key) / _area(nearest)) ** _AREA_EXPONENT)


def _area(batch_key: BatchKey) -> int:
    return batch_key.width_px * batch_key.height_px
