"""The statistics that the server has counted, for its routes and page, as the registrar has them."""

import asyncio
import pathlib
import threading
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from noria.config import VariableKind
from noria.errors import ConfigError, RegistryConflict, RegistryUnavailable, short_repr
from noria.folders import file_version
from noria.registry.statistics.file import read_statistics
from noria.statistics.distributions import OTHER, Counts, Histogram, add_counts, most_frequent
from noria.statistics.drift import Drift
from noria.statistics.windows import NUM_CURRENT, Reference, Series, SeriesKey, Snapshot

MAX_CATEGORIES_SHOWN = 20  # the most frequent ones; the rest is "other"
PSI_THRESHOLD = 0.1  # threshold of the alert NoriaDrift
_RETRY_AFTER_S = 5.0

ReadSnapshot = Callable[[], Awaitable[Snapshot | None]]
"""Returns what the registrar has counted; None: nothing. Raises RegistryUnavailable."""


class ReferenceInfo(Struct, frozen=True):
    """Where a reference is from."""

    version: str
    num_values: int
    at: float
    by: str
    why: str


class SeriesSummary(Struct, frozen=True):
    """A variable of a version at an endpoint, in the current windows."""

    endpoint: str
    version: str
    variable: str
    kind: VariableKind
    num_values: int
    num_invalid: int
    mean: float | None  # mean of numbers
    most_frequent: str | None  # category
    drift: Drift | None  # None: it has no reference, or none that can be compared
    reference: ReferenceInfo | None


class StatisticsList(Struct, frozen=True):
    """The list of what is counted."""

    window_s: float
    current_windows: int  # that are compared with the reference, together
    psi_threshold: float  # value of the corrected index above which the alert fires
    data: list[SeriesSummary]


class WindowCounts(Struct, frozen=True):
    """The values of one window, by cell, and the drift of the windows up to it."""

    start: float  # Unix time
    counts: list[int]
    psi: float | None


class SeriesDetail(Struct, frozen=True):
    """The distributions of one series."""

    series: SeriesSummary
    window_s: float
    psi_threshold: float
    cells: list[str]  # upper edges of a histogram, the last is +Inf; categories, the most frequent first
    current: list[int]
    reference: list[int] | None
    windows: list[WindowCounts]  # those with values, the oldest first


class StatisticsFile:
    """The registrar's file, read when it has changed."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._read: tuple[tuple[int, ...], Snapshot] | None = None  # with the file's version

    async def read(self) -> Snapshot | None:
        """Return what it has; None: nothing was ever counted. Raises RegistryUnavailable: it cannot be read."""
        return await asyncio.to_thread(self._read_if_changed)

    def _read_if_changed(self) -> Snapshot | None:
        with self._lock:
            version = file_version(self._path)
            if not version:  # nothing was ever counted
                return None
            if self._read is None or self._read[0] != version:
                try:
                    snapshot = read_statistics(self._path)
                except ConfigError as error:
                    raise RegistryUnavailable(error.message, retry_after_s=_RETRY_AFTER_S) from error
                if snapshot is None:
                    return None
                self._read = version, snapshot
            return self._read[1]


class StatisticsService:
    """Summarizes what `read` returns."""

    def __init__(self, read: ReadSnapshot) -> None:
        self._read = read

    async def list_series(self) -> StatisticsList:
        """Return all series. Raises RegistryUnavailable: they cannot be read."""
        return await asyncio.to_thread(_list, await self._read())

    async def detail(self, key: SeriesKey) -> SeriesDetail:
        """Return the distributions of a series.

        Raises:
            RegistryConflict: there is none.
            RegistryUnavailable: they cannot be read.
        """
        return await asyncio.to_thread(_detail, await self._read(), key)


def _list(snapshot: Snapshot | None) -> StatisticsList:
    data = [] if snapshot is None else [_summary(series, snapshot.now) for series in snapshot.series]
    window_s = 0.0 if snapshot is None else snapshot.window_s
    return StatisticsList(window_s, NUM_CURRENT, PSI_THRESHOLD, data)


def _detail(snapshot: Snapshot | None, key: SeriesKey) -> SeriesDetail:
    found = [] if snapshot is None else snapshot.series
    for number, field in enumerate(SeriesKey._fields):
        alike = [series for series in found if series.key[number] == key[number]]
        if not alike:
            known = ", ".join(sorted({series.key[number] for series in found})[:20]) or "none: nothing was counted"
            raise RegistryConflict(f"{field} is {short_repr(key[number])}; there are {known}.", field=field)
        found = alike
    assert snapshot is not None, "there is a series"
    (series,) = found
    cells, current = _cells(series, snapshot.now), series.current(snapshot.now)
    return SeriesDetail(
        _summary(series, snapshot.now),
        snapshot.window_s,
        PSI_THRESHOLD,
        cells,
        _counts_by_cell(current, cells),
        None if series.reference is None else _counts_by_cell(series.reference.counts, cells),
        [
            WindowCounts(
                window * snapshot.window_s, _counts_by_cell(counts, cells), None if drift is None else drift.psi
            )
            for window, counts, drift in series.over_time()
        ],
    )


def _summary(series: Series, now: int) -> SeriesSummary:
    counts, mean, most_frequent = series.current(now), None, None
    total = 0 if counts is None else counts.total
    if isinstance(counts, Histogram):
        mean = counts.sum / total if total else None
    elif counts is not None:
        most_frequent = max(counts.counts, key=counts.counts.__getitem__, default=None)
    return SeriesSummary(
        *series.key,
        series.kind,
        total,
        counts.num_invalid if isinstance(counts, Histogram) else 0,
        mean,
        most_frequent,
        series.drift,
        None if series.reference is None else _info(series.reference),
    )


def _info(reference: Reference) -> ReferenceInfo:
    return ReferenceInfo(reference.version, reference.counts.total, reference.at, reference.by, reference.why)


def _cells(series: Series, now: int) -> list[str]:
    """Return the names of all cells of a histogram, or of the most frequent categories now and in the reference."""
    latest = series.windows[max(series.windows)]
    if isinstance(latest, Histogram):
        return [*(f"{edge:g}" for edge in latest.edges), "+Inf"]
    current = series.current(now) or latest
    reference = {} if series.reference is None else series.reference.counts.cells()
    names = add_counts(current.cells(), reference)
    names.pop(OTHER, None)
    return [*most_frequent(names)[:MAX_CATEGORIES_SHOWN], OTHER]


def _counts_by_cell(counts: Counts | None, cells: Sequence[str]) -> list[int]:
    if counts is None:
        return [0] * len(cells)
    found = counts.cells()
    by_cell = [found.pop(name, 0) for name in cells]
    if not isinstance(counts, Histogram):
        by_cell[-1] += sum(found.values())
    return by_cell
