"""The outcome of one arm of a canary, the canary itself or its control, in one window."""

from msgspec import Struct

from noria.errors import short_repr
from noria.statistics.distributions import add_counts


class Arm(Struct, frozen=True):
    """The outcome of one arm in one window. The default is an empty one. Raises ValueError if counts are impossible."""

    n: int = 0  # responses, rejections among them
    errors: int = 0  # errors among the responses
    latencies: dict[str, list[float]] = {}  # by shape (only equal shapes are compared); seconds, or any unit
    cells: dict[str, dict[str, int]] = {}  # cells by user guard: counts by cell, as `distributions.py` returns them
    rejections: int = 0  # rejections among the responses; other ones than the errors
    repeats: int = 0  # responses to sticky keys that had counted before; in no other count

    def __post_init__(self) -> None:
        if min(self.errors, self.rejections, self.repeats) < 0 or self.errors + self.rejections > self.n:
            raise ValueError(
                f"{self.errors} errors and {self.rejections} rejections of {self.n} responses, {self.repeats} repeats; "
                "errors and rejections are at most the responses, and none is below 0"
            )
        for guard, counts in self.cells.items():
            if counts and min(counts.values()) < 0:
                raise ValueError(f"guard {short_repr(guard)} has {short_repr(counts)}; counts are 0 or more")

    def merge(self, other: "Arm") -> "Arm":
        """Return both together: the same window of another process, or the next window."""
        latencies = {shape: list(values) for shape, values in self.latencies.items()}
        for shape, values in other.latencies.items():
            latencies.setdefault(shape, []).extend(values)
        cells = {
            guard: add_counts(self.cells.get(guard, {}), other.cells.get(guard, {}))
            for guard in [*self.cells, *(guard for guard in other.cells if guard not in self.cells)]
        }
        return Arm(
            self.n + other.n,
            self.errors + other.errors,
            latencies,
            cells,
            self.rejections + other.rejections,
            self.repeats + other.repeats,
        )
