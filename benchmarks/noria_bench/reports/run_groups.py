"""Groups runs that are compared: all of a scenario with the same arrivals, all of a sweep, all of the deadlines bench.

Pure.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from noria_bench.measurement.runs import BenchRun
from noria_bench.targets.catalog import TARGETS

SCENARIOS = {
    "scenario1": "Scenario 1: one user",
    "scenario2": "Scenario 2: users who arrive one by one",
    "mixed": "Mixed traffic",
}
DEADLINES = "deadlines"
_MAIN_MIXES = ("mixed", "mixed-settings")
_SEPARATOR = ", "
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Group:
    """Runs that are compared, in the order of the tables."""

    bench: str
    variant: str  # variant of all runs; empty if each has its own
    runs: tuple[BenchRun, ...]

    @property
    def is_sweep(self) -> bool:
        """Whether settings were varied, rather than targets or policies compared."""
        return self.bench not in SCENARIOS and self.bench != DEADLINES

    @property
    def title(self) -> str:
        """The heading of its section."""
        if self.bench == DEADLINES:
            return "Deadlines: policies by load"
        name = SCENARIOS.get(self.bench, f"Sweep: {self.bench.removeprefix('sweep').strip(' -_')}")
        arrivals = " arrivals" if self.runs[0].traffic.kind == "open" else ""
        return f"{name}, {self.variant}{arrivals}" if self.variant else name

    @property
    def slug(self) -> str:
        """Its name in file names and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.bench} {self.variant}".lower()).strip("-") or "runs"

    @property
    def main_runs(self) -> tuple[BenchRun, ...]:
        """The compared runs: of mixed closed loops those of mixed settings, unless there is nothing else."""
        return tuple(run for run in self.runs if run.bench != "mixed" or run.traffic.mix in _MAIN_MIXES) or self.runs

    def label(self, run: BenchRun) -> str:
        """The name of a run's row."""
        own = run.variant.removeprefix(self.variant).removeprefix(_SEPARATOR)
        several = len({other.target for other in self.runs}) > 1
        if self.is_sweep:
            return f"{run.target}: {own}" if several and own else own or run.target
        return f"{run.target} ({own})" if own else run.target

    def last_run_of(self, target: str) -> BenchRun | None:
        """The last main run of `target`; None without one."""
        return next((run for run in reversed(self.main_runs) if run.target == target), None)


def group_runs(runs: Iterable[BenchRun]) -> list[Group]:
    """Scenarios in their order, then other benches by name.

    Targets are in the catalog's order, variants by their numbers.
    """
    found: dict[tuple[str, str], list[BenchRun]] = {}
    for run in runs:
        # A scenario's variant begins with its arrivals or users, which all runs of the group share.
        shared = run.traffic.arrivals or f"{run.traffic.num_users} users"
        has_shared = run.bench in SCENARIOS and run.variant.partition(_SEPARATOR)[0] == shared
        found.setdefault((run.bench, shared if has_shared else ""), []).append(run)
    order = list(SCENARIOS)
    keys = sorted(found, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), *key))
    return [Group(bench, variant, tuple(_sorted_runs(found[bench, variant]))) for bench, variant in keys]


def variant_numbers(variant: str) -> tuple[float, float] | None:
    """Both numbers of a variant such as `250 ms, 8`; None if it is not two settings with one number each."""
    numbers = [_NUMBER.findall(part) for part in variant.split(",")]
    if [len(part) for part in numbers] != [1, 1]:
        return None
    return float(numbers[0][0]), float(numbers[1][0])


def _sorted_runs(runs: Sequence[BenchRun]) -> list[BenchRun]:
    names = list(TARGETS)

    def sort_key(run: BenchRun) -> tuple[int, str]:
        return (names.index(run.target) if run.target in names else len(names), run.target)

    if all(variant_numbers(run.variant) for run in runs):
        return sorted(runs, key=lambda run: (*sort_key(run), variant_numbers(run.variant) or ()))
    # Stable: runs of a target stay in the order of their loads, then of their start.
    return sorted(sorted(runs, key=lambda run: run.traffic.load_percent or 0), key=sort_key)
