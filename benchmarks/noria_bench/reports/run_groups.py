"""Which runs stand side by side: all of a scenario under the same arrivals, all of a sweep. Pure."""

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
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Group:
    """Runs that are compared with one another, in the order of the tables."""

    bench: str
    variant: str  # of all of them; empty where each has its own
    runs: tuple[BenchRun, ...]

    @property
    def is_sweep(self) -> bool:
        """Whether settings were turned, rather than targets compared."""
        return self.bench not in SCENARIOS

    @property
    def title(self) -> str:
        """A heading."""
        name = SCENARIOS.get(self.bench, f"Sweep: {self.bench.removeprefix('sweep').strip(' -_')}")
        return f"{name}, {self.variant} arrivals" if self.variant else name

    @property
    def slug(self) -> str:
        """For file names and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.bench} {self.variant}".lower()).strip("-") or "runs"

    def label(self, run: BenchRun) -> str:
        """A row's name, short."""
        own = "" if run.variant == self.variant else run.variant
        several = len({other.target for other in self.runs}) > 1
        if self.is_sweep:
            return f"{run.target}: {own}" if several and own else own or run.target
        return f"{run.target} ({own})" if own else run.target

    def last_run_of(self, target: str) -> BenchRun | None:
        """The last run of `target`, if there is one."""
        return next((run for run in reversed(self.runs) if run.target == target), None)


def group_runs(runs: Iterable[BenchRun]) -> list[Group]:
    """Scenarios in their order, then sweeps by name; targets as the command line names them, variants by their numbers."""
    found: dict[tuple[str, str], list[BenchRun]] = {}
    for run in runs:
        # Arrivals are the variant of an open scenario; elsewhere a variant is the run's own.
        shared = run.variant if run.bench in SCENARIOS and run.variant == (run.traffic.arrivals or "") else ""
        found.setdefault((run.bench, shared), []).append(run)
    order = list(SCENARIOS)
    keys = sorted(found, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), *key))
    return [Group(bench, variant, tuple(_sorted_runs(found[bench, variant]))) for bench, variant in keys]


def variant_numbers(variant: str) -> tuple[float, float] | None:
    """Both numbers of a variant such as `250 ms, 8`; None where it is not two settings of one number each."""
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
    return sorted(runs, key=sort_key)  # stable: as they were begun
