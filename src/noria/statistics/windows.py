"""The counts of all variables over time: of all front ends together, in windows of equal length, the newest ones kept.

A *series* is one variable of one version at one endpoint. A front end reports what it has counted since its last
report; a value is in the window in which it is reported, at most half a second after it was counted.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from noria.config import VariableKind
from noria.statistics.distributions import CategoryCounts, Counts, Histogram, merge_counts
from noria.statistics.drift import Drift, compare_categories, compare_histograms, compared_names

NUM_WINDOWS = 288  # that are kept: of 5 minutes, a day
NUM_CURRENT = 12  # that are compared with the reference, together: of 5 minutes, an hour
MAX_SERIES = 1000
NO_VERSION = "none"  # the version of values that were recorded without a model
MAX_CELLS = 500_000  # cells of all windows; older windows are dropped before the file has 10 MB


class SeriesKey(NamedTuple):
    """The names that tell series apart."""

    endpoint: str
    version: str  # MODEL@NUMBER, or the fingerprint of a model of the configuration
    variable: str


class CountsReport(Struct, frozen=True):
    """The counts of one series by a front end since its last report."""

    series: SeriesKey
    kind: VariableKind
    window: int  # its number: Unix time divided by the length of a window
    counts: Counts


class Reference(Struct, frozen=True):
    """The distribution that a version's variable is compared with."""

    endpoint: str
    version: str  # MODEL@NUMBER
    fingerprint: str  # fingerprint of the version
    variable: str
    counts: Counts
    at: float  # when it was chosen, Unix time
    by: str
    why: str

    def is_of(self, key: SeriesKey) -> bool:
        """Whether a series is compared with it."""
        return (self.endpoint, self.variable) == (key.endpoint, key.variable) and key.version in (
            self.version,
            self.fingerprint,
        )


class Series(Struct):
    """The windows of one series."""

    key: SeriesKey
    kind: VariableKind
    windows: dict[int, Counts] = {}  # by number; those without a value are missing
    reference: Reference | None = None
    drift: Drift | None = None  # drift of the current windows from the reference

    @property
    def has_distribution(self) -> bool:
        """Whether it can be compared; else only its sum and number of values are kept."""
        return self.kind in ("scalar", "category")

    @property
    def num_cells(self) -> int:
        """About the size of its windows."""
        return sum(len(counts.counts) for counts in self.windows.values())

    def between(self, first: int, last: int) -> Counts | None:
        """Return the counts of the windows from `first` to `last`; None: there are none."""
        total: Counts | None = None
        for window, counts in self.windows.items():
            if first <= window <= last:
                total = counts if total is None else merge_counts(total, counts)
        return total

    def current(self, now: int) -> Counts | None:
        """Return what is compared with the reference in the window `now`; None: there are no values."""
        return self.between(now - NUM_CURRENT + 1, now)

    def over_time(self) -> Iterator[tuple[int, Counts, Drift | None]]:
        """Yield number and counts of each window, the oldest first, and the drift of the windows up to it."""
        recent: deque[tuple[int, Counts]] = deque()
        reference, windows = self._comparable()
        for window, counts in sorted(self.windows.items()):
            recent.append((window, windows[window]))
            while recent[0][0] <= window - NUM_CURRENT:
                recent.popleft()
            total = recent[0][1]
            for _, each in list(recent)[1:]:
                total = merge_counts(total, each)
            yield window, counts, compare(reference, total)

    def _comparable(self) -> "tuple[Reference | None, Mapping[int, Counts]]":
        """Return the reference and the windows with few categories: those that all windows are compared by."""
        total = self.between(min(self.windows), max(self.windows))
        before = None if self.reference is None else self.reference.counts
        if self.reference is None or not isinstance(before, CategoryCounts) or not isinstance(total, CategoryCounts):
            return self.reference, self.windows
        names = compared_names(before, total)
        reference = msgspec.structs.replace(self.reference, counts=before.only(names))
        windows = {
            window: counts.only(names) for window, counts in self.windows.items() if isinstance(counts, CategoryCounts)
        }
        return reference, windows


class Snapshot(Struct):
    """All series at one time, as the registrar keeps them in a file."""

    window_s: float
    now: int  # the window in which it was written
    series: list[Series]


def compare(reference: Reference | None, current: Counts | None) -> Drift | None:
    """Return the drift from a reference; None: there is none, or it has other edges than are counted now."""
    if reference is None or current is None:
        return None
    before = reference.counts
    if isinstance(before, Histogram) and isinstance(current, Histogram) and before.edges == current.edges:
        return compare_histograms(before, current)
    if isinstance(before, CategoryCounts) and isinstance(current, CategoryCounts):
        return compare_categories(before, current)
    return None


class StatisticsHistory:
    """The windows of all series, of one length."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._series: dict[SeriesKey, Series] = {}

    def restore(self, snapshot: Snapshot) -> None:
        """Go on with what was kept, if its windows are as long as now."""
        if snapshot.window_s == self._window_s:
            self._series = {each.key: each for each in snapshot.series}

    def add(self, reports: Iterable[CountsReport]) -> None:
        """Add what a front end has counted. A variable with other edges than before begins anew."""
        for report in reports:
            series = self._series.get(report.series)
            if series is None or series.kind != report.kind:
                series = self._series[report.series] = Series(report.series, report.kind)
            known = series.windows.get(report.window)
            if known is None:
                latest = next(reversed(series.windows.values()), None)
                if latest is not None and not _is_alike(latest, report.counts):
                    series.windows = {}
                series.windows[report.window] = report.counts
            elif _is_alike(known, report.counts):
                series.windows[report.window] = merge_counts(known, report.counts)
            else:
                series.windows = {report.window: report.counts}

    def snapshot(self, now: int, references: Iterable[Reference]) -> Snapshot:
        """Forget old windows, compare the current ones with `references`, of which the last one of a series holds."""
        by_variable: dict[tuple[str, str], list[Reference]] = {}
        for reference in references:
            by_variable.setdefault((reference.endpoint, reference.variable), []).append(reference)
        self._forget(now)
        for series in self._series.values():
            candidates = by_variable.get((series.key.endpoint, series.key.variable), ())
            found = [reference for reference in candidates if reference.is_of(series.key)]
            series.reference = found[-1] if found and series.has_distribution else None
            series.drift = compare(series.reference, series.current(now))
        return Snapshot(self._window_s, now, sorted(self._series.values(), key=lambda series: series.key))

    def _forget(self, now: int) -> None:
        """Keep the newest windows; of too many series, those that were counted last."""
        first, size = now - NUM_WINDOWS + 1, 0
        for series in self._series.values():
            if next(iter(series.windows), first) < first:
                series.windows = {window: counts for window, counts in series.windows.items() if window >= first}
            size += series.num_cells
        kept = sorted(
            (series for series in self._series.values() if series.windows),
            key=lambda series: max(series.windows),
            reverse=True,
        )
        self._series = {series.key: series for series in kept[:MAX_SERIES]}
        while size > MAX_CELLS:
            oldest = min(min(series.windows) for series in self._series.values())
            for series in list(self._series.values()):
                if (dropped := series.windows.pop(oldest, None)) is not None:
                    size -= len(dropped.counts)
                if not series.windows:
                    del self._series[series.key]


def _is_alike(first: Counts, second: Counts) -> bool:
    if isinstance(first, Histogram) and isinstance(second, Histogram):
        return first.edges == second.edges
    return type(first) is type(second)
