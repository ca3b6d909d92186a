"""The cost model: durations of model calls, of decodes, and of encoding start images and texts, by key and batch size.

Measured when the engine starts, refined at every iteration, and cached between starts. From it come the number of rows
at which a larger call stops paying off (the knee) and, in `step/forecast.py`, the predicted start and finish of each
request. Pure: callers pass in the measurements.

Two mechanisms follow changes: the *slowdown*, one factor on all curves, follows within about twenty iterations what
slows everything equally, such as another process on the same machine; each curve moves slowly towards what the slowdown
does not explain.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field

from noria.protocol.model_spec import ModelKey
from noria.scheduling.types import BatchKey

_SLOWDOWN_WEIGHT = 0.08  # weight of one iteration
# Without measurements the slowdown decays to 1: rejected requests are not measured, so a high slowdown would never be
# corrected.
_SLOWDOWN_DECAY_S = 3.0
_AVERAGING_WINDOW = 50  # measurements of one count: up to this many their mean, from then on a moving average
_MIN_MEASUREMENTS = 3  # a count measured less often is ignored by the knee
# Measurements are clamped to this ratio to the known cost: the slow first iteration of a new kernel must not spoil it.
_MAX_OUTLIER_RATIO = 4.0
_KNEE_THROUGHPUT = 0.95  # throughput at the knee, as a fraction of the best
# All ready rows share a call if they are at most this many times the limit. A few that were paused would wait for
# another round: with 8 alike images and room for 6, p99 is 1.5 times as long as if all 8 step, for no more throughput.
_MAX_STRETCH = 1.4
# After this many iterations one tries twice the knee's rows: without that, a knee that is too low is never corrected.
_EXPLORATION_INTERVAL = 100
_MIN_EXPLORED_ROWS = 4  # two guided images: from one row, twice as many would always be the same single image
# Rows beyond the knee are measured that rarely. Each such measurement counts more, because a start on a busy machine
# may have measured them wrong, and its costs are cached.
_EXPLORATION_WINDOW = 5
_KNEE_REFRESH_INTERVAL = 1000  # iterations of one batch key
_AREA_EXPONENT = 1.1  # cost of a step by image area: attention grows faster than convolution


@dataclass(slots=True)
class CostCurve:
    """Seconds by count (rows of a call, images of a decode): piecewise linear between measurements."""

    points: dict[int, float] = field(default_factory=dict)
    num_measurements: InitVar[int] = _AVERAGING_WINDOW  # number for each given point; fewer yield sooner to new ones
    _counts: list[int] = field(init=False)  # sorted
    _num_measurements: dict[int, int] = field(init=False)  # by count

    def __post_init__(self, num_measurements: int) -> None:
        self._counts = sorted(self.points)
        self._num_measurements = dict.fromkeys(self.points, num_measurements)

    def at(self, count: int) -> float:
        """Seconds at `count`: interpolated, or extrapolated beyond the last point; 0 if nothing is known."""
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
            # With the slope of the whole curve: either of the last two points may be an outlier.
            return max(self.points.values()) + self._slope(counts[0], counts[-1]) * (count - counts[-1])
        return self.points[counts[right - 1]] + self._slope(counts[right - 1], counts[right]) * (
            count - counts[right - 1]
        )

    def _slope(self, low: int, high: int) -> float:
        return max((self.points[high] - self.points[low]) / (high - low), 0.0)

    def overhead(self) -> float | None:
        """Return the duration at count 0 divided by that of one count more, of the line nearest to the curve.

        The line has the least squares of relative errors. None if the curve has fewer than two points.
        """
        if len(self.points) < 2:
            return None
        sum_uu = sum_uv = sum_vv = sum_u = sum_v = 0.0
        for count, seconds in self.points.items():
            u, v = 1 / seconds, count / seconds
            sum_uu, sum_uv, sum_vv, sum_u, sum_v = (
                sum_uu + u * u, sum_uv + u * v, sum_vv + v * v, sum_u + u, sum_v + v
            )  # fmt: skip
        at_0, of_one_more = sum_u * sum_vv - sum_v * sum_uv, sum_v * sum_uu - sum_u * sum_uv
        if at_0 <= 0:
            return 0.0
        return min(at_0 / of_one_more, self._counts[-1]) if of_one_more > 0 else float(self._counts[-1])

    def observe(self, count: int, seconds: float, window: int = _AVERAGING_WINDOW) -> None:
        """Update the curve with a measurement, which weighs at least 1 / `window`."""
        if known := self.at(count):
            seconds = min(max(seconds, known / _MAX_OUTLIER_RATIO), known * _MAX_OUTLIER_RATIO)
        if count not in self.points:
            insort(self._counts, count)
        num_measurements = self._num_measurements[count] = self._num_measurements.get(count, 0) + 1
        before = self.points.setdefault(count, seconds)
        self.points[count] = before + (seconds - before) / min(num_measurements, window)

    def knee(self, max_count: int) -> int | None:
        """Smallest count whose throughput is within 5 % of the best; None if larger ones may still pay off.

        They may if throughput grows up to the largest count that was measured, and this is below `max_count`.
        """
        measured = [count for count in self._counts if self._num_measurements[count] >= _MIN_MEASUREMENTS]
        if not measured:
            return None
        is_complete = measured[-1] >= max_count
        measured = [count for count in measured if count <= max_count] or [max_count]
        best = max(count / self.at(count) for count in measured)
        knee = next(count for count in measured if count / self.at(count) >= _KNEE_THROUGHPUT * best)
        return knee if is_complete or 2 * knee <= measured[-1] else None

    def next_count(self) -> int:
        """Return twice the largest count that was measured; 0 if none was."""
        measured = [count for count in self._counts if self._num_measurements[count] >= _MIN_MEASUREMENTS]
        return 2 * measured[-1] if measured else 0


_Curves = dict[BatchKey, CostCurve]
Totals = dict[int, tuple[int, float]]
"""By count (rows of a call, images of a decode): the number of measurements, and the sum of their seconds."""


def _add_total(totals: dict[BatchKey, Totals], batch_key: BatchKey, count: int, seconds: float) -> None:
    of_key = totals.setdefault(batch_key, {})
    number, before_s = of_key.get(count, (0, 0.0))
    of_key[count] = number + 1, before_s + seconds


@dataclass(slots=True)
class CostModel:
    """Measured costs by batch key; `max_rows` bounds the knee."""

    max_rows: int = 64
    steps: dict[BatchKey, CostCurve] = field(default_factory=dict)
    decodes: dict[BatchKey, CostCurve] = field(default_factory=dict)
    text_encode_s_by_model: dict[ModelKey, float] = field(default_factory=dict)  # seconds of encoding one prompt
    slowdown: float = 1.0  # current duration of iterations, relative to the curves
    image_encodes: dict[BatchKey, CostCurve] = field(default_factory=dict)  # encoding of start images
    # What was measured, as it was: how often, and all seconds, by count.
    step_totals: dict[BatchKey, Totals] = field(default_factory=dict)
    decode_totals: dict[BatchKey, Totals] = field(default_factory=dict)
    packed_models: set[ModelKey] = field(default_factory=set)  # whose calls cost by their tokens, without padding
    _memory_limits: dict[BatchKey, int] = field(default_factory=dict)  # rows known to fit the memory
    _num_iterations: dict[BatchKey, int] = field(default_factory=dict)  # planned
    _knees: dict[BatchKey, int] = field(default_factory=dict)  # as of the last `refresh_knees`

    @property
    def _curves(self) -> tuple[_Curves, _Curves, _Curves]:
        return self.steps, self.decodes, self.image_encodes

    def step_s(self, batch_key: BatchKey, rows: int) -> float:
        """Duration of one model call with `rows` rows, at the current slowdown."""
        return self.slowdown * self._curve_s(self.steps, batch_key, rows)

    def step_overhead(self, batch_key: BatchKey) -> float | None:
        """Duration of a call with no rows, in those of one row more; None if fewer than two points are measured."""
        curve = self.steps.get(batch_key)
        return None if curve is None else curve.overhead()

    def decode_s(self, batch_key: BatchKey, images: int = 1) -> float:
        """Duration of decoding `images` images together, at the current slowdown."""
        return self.slowdown * self._curve_s(self.decodes, batch_key.decode_key, images) if images else 0.0

    def image_encode_s(self, batch_key: BatchKey, images: int = 1) -> float:
        """Duration of encoding `images` start images together; until a model has encoded one, that of decoding."""
        known = any(other.model == batch_key.model for other in self.image_encodes)
        curves = self.image_encodes if known else self.decodes
        return self.slowdown * self._curve_s(curves, batch_key, images) if images else 0.0

    def text_encode_s(self, model: ModelKey) -> float:
        """Duration of encoding one prompt, at the current slowdown."""
        return self.slowdown * self.text_encode_s_by_model.get(model, 0.0)

    def rows_limit(self, batch_key: BatchKey) -> int:
        """Maximum rows of a call with this batch key: the knee, bounded by memory; at least 1."""
        knee = self._knees.get(batch_key) or self._nearest_knee(batch_key)
        return max(1, min(knee, self._memory_limits.get(batch_key, self.max_rows)))

    def _nearest_knee(self, batch_key: BatchKey) -> int:
        """Return the knee of the nearest size of its model; without one, `max_rows`."""
        nearest = _nearest(batch_key, self._knees)
        return self.max_rows if nearest is None else self._knees[nearest]

    def stretched_limit(self, batch_key: BatchKey, limit: int, ready_rows: int) -> int:
        """Return `limit`, or all of the `ready_rows` if they are a few more and fit: pausing a few does not pay off."""
        fitting = min(_MAX_STRETCH * limit, self._memory_limits.get(batch_key, self.max_rows), self.max_rows)
        return ready_rows if limit < ready_rows <= fitting else limit

    @property
    def has_run_out(self) -> bool:
        """Whether a call did not fit the memory."""
        return bool(self._memory_limits)

    @property
    def longest_s(self) -> float:
        """Duration of the longest measured step, decode or encode of start images; 0 if there is none."""
        curves = (curve for curves in self._curves for curve in curves.values())
        return max((seconds for curve in curves for seconds in curve.points.values()), default=0.0)

    def exploration_limit(self, batch_key: BatchKey) -> int:
        """Return the row limit of the iteration being planned, and count that iteration.

        Equals `rows_limit`, except that every hundredth iteration tries up to twice as many rows, bounded by memory, to
        learn whether they pay off. Refreshes the knees every thousandth iteration.
        """
        limit = self.rows_limit(batch_key)
        num_iterations = self._num_iterations[batch_key] = self._num_iterations.get(batch_key, 0) + 1
        if num_iterations % _KNEE_REFRESH_INTERVAL == 0:
            self.refresh_knees()
        if num_iterations % _EXPLORATION_INTERVAL:
            return limit
        return min(max(2 * limit, _MIN_EXPLORED_ROWS), self._memory_limits.get(batch_key, self.max_rows), self.max_rows)

    def record_oom(self, batch_key: BatchKey, rows: int) -> None:
        """Halve the row limit after a call of `rows` rows ran out of memory."""
        self._memory_limits[batch_key] = max(1, rows // 2)

    def observe_step(self, batch_key: BatchKey, rows: int, seconds: float) -> None:
        """Record the duration of one model call."""
        _add_total(self.step_totals, batch_key, rows, seconds)
        curve = self.steps.setdefault(batch_key, CostCurve())
        if rows in curve.points:  # a new point says nothing of the slowdown
            ratio = min(max(seconds / curve.points[rows], 1 / _MAX_OUTLIER_RATIO), _MAX_OUTLIER_RATIO)
            self.slowdown += _SLOWDOWN_WEIGHT * (ratio - self.slowdown)
        is_exploration = rows > self.rows_limit(batch_key)
        curve.observe(rows, seconds / self.slowdown, _EXPLORATION_WINDOW if is_exploration else _AVERAGING_WINDOW)

    def observe_decode(self, batch_key: BatchKey, images: int, seconds: float) -> None:
        """Record the duration of one decode."""
        _add_total(self.decode_totals, batch_key.decode_key, images, seconds)
        self.decodes.setdefault(batch_key.decode_key, CostCurve()).observe(images, seconds / self.slowdown)

    def observe_image_encode(self, batch_key: BatchKey, images: int, seconds: float) -> None:
        """Record the duration of encoding `images` start images together."""
        self.image_encodes.setdefault(batch_key, CostCurve()).observe(images, seconds / self.slowdown)

    def observe_text_encode(self, model: ModelKey, prompts: int, seconds: float) -> None:
        """Record the duration of encoding `prompts` prompts together."""
        each = seconds / prompts / self.slowdown
        before = self.text_encode_s_by_model.setdefault(model, each)
        self.text_encode_s_by_model[model] = before + (each - before) / _AVERAGING_WINDOW

    def merge_min(self, other: "CostModel") -> None:
        """Keep the shorter of both models' measurements: only disturbances make one longer."""
        for mine, others in zip(self._curves, other._curves, strict=True):
            for batch_key in mine.keys() & others.keys():
                points = {n: min(s, others[batch_key].points.get(n, s)) for n, s in mine[batch_key].points.items()}
                mine[batch_key] = CostCurve(points)
        self.text_encode_s_by_model |= {
            m: min(s, other.text_encode_s_by_model.get(m, s)) for m, s in self.text_encode_s_by_model.items()
        }

    def add(self, other: "CostModel") -> None:
        """Add the costs of models that have none here; the batch sizes of the others stay."""
        for mine, others in zip(self._curves, other._curves, strict=True):
            mine.update(others)
        self.text_encode_s_by_model |= other.text_encode_s_by_model
        self._knees |= self._find_knees(other.steps)

    def copy_as(self, model: ModelKey, copy: ModelKey) -> "CostModel":
        """Return the costs of `model` as those of `copy`."""
        steps, decodes, image_encodes = (
            {
                key._replace(model=copy): CostCurve(dict(each.points))
                for key, each in curves.items()
                if key.model == model
            }
            for curves in self._curves
        )
        text_encodes = self.text_encode_s_by_model
        of_copy = {copy: text_encodes[model]} if model in text_encodes else {}
        return CostModel(self.max_rows, steps, decodes, of_copy, image_encodes=image_encodes)

    def as_estimates(self) -> "CostModel":
        """Return these costs, measured while other work disturbed it, such that those in service soon replace them."""
        steps, decodes, image_encodes = (
            {batch_key: CostCurve(dict(curve.points), num_measurements=1) for batch_key, curve in curves.items()}
            for curves in self._curves
        )
        return CostModel(self.max_rows, steps, decodes, image_encodes=image_encodes)

    def forget(self, model: ModelKey) -> None:
        """Drop all that is known of a model."""
        totals = (self.step_totals, self.decode_totals)
        for values in (*self._curves, *totals, self._memory_limits, self._num_iterations, self._knees):
            for batch_key in [batch_key for batch_key in values if batch_key.model == model]:
                del values[batch_key]
        self.text_encode_s_by_model.pop(model, None)
        self.packed_models.discard(model)

    def decay_slowdown(self, seconds: float) -> None:
        """Decay the slowdown after `seconds` without measurements."""
        self.slowdown = 1.0 + (self.slowdown - 1.0) * math.exp(-max(seconds, 0.0) / _SLOWDOWN_DECAY_S)

    def refresh_knees(self) -> None:
        """Recompute the knees.

        Called after calibration, when idle, and otherwise rarely, so that batch sizes stay stable.
        """
        self._knees = self._find_knees(self.steps)

    def _find_knees(self, steps: Mapping[BatchKey, CostCurve]) -> dict[BatchKey, int]:
        """Return the knees of `steps`; where larger calls may still pay off, twice what was measured.

        Or the knee of the nearest size of the model, if that is larger. Keys without measurements are left out.
        """
        found = {key: knee for key, curve in steps.items() if (knee := curve.knee(self.max_rows)) is not None}
        limits = dict(found)
        for batch_key, curve in steps.items():
            if batch_key not in found and (rows := curve.next_count()):
                nearest = _nearest(batch_key, found)
                limits[batch_key] = min(max(rows, 0 if nearest is None else found[nearest]), self.max_rows)
        return limits

    def _curve_s(self, curves: Mapping[BatchKey, CostCurve], batch_key: BatchKey, count: int) -> float:
        """From the key's own curve, or scaled by area from the nearest size of its model, if known of its stage.

        0 if nothing is known.
        """
        if batch_key in curves:
            return curves[batch_key].at(count)
        nearest = _nearest(batch_key, curves)
        if nearest is None:
            return 0.0
        return float(curves[nearest].at(count) * (batch_key.area_px / nearest.area_px) ** _AREA_EXPONENT)


def _nearest(batch_key: BatchKey, known: Iterable[BatchKey]) -> BatchKey | None:
    """Return the key of the same model, if possible of the same stage, with the nearest area; None: there is none."""
    same_model = [other for other in known if other.model == batch_key.model]
    return min(
        same_model,
        key=lambda other: (other.stage != batch_key.stage, abs(other.area_px - batch_key.area_px)),
        default=None,
    )
