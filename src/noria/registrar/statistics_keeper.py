"""Keeps what all front ends count, compares it with the references in the registry, and exports the drift.

The windows are in a file, so that they outlive the registrar: a registrar that was killed has lost some seconds.
"""

import asyncio
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence

from noria.errors import ConfigError
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations
from noria.registrar.registry_access import RegistryAccess
from noria.registry.statistics.file import encode_statistics, read_statistics
from noria.statistics.drift import Drift
from noria.statistics.windows import CountsReport, Reference, Series, SeriesKey, Snapshot, StatisticsHistory
from noria.storage.private_files import replace_private_file

_MAX_INTERVAL_S = 5.0

log = logging.getLogger("noria.registrar")


class StatisticsKeeper:
    """The statistics of one server, in `file`."""

    def __init__(
        self, window_s: float, file: pathlib.Path, registry: RegistryAccess, clock: Callable[[], float] = time.time
    ) -> None:
        self._window_s, self._file, self._registry, self._clock = window_s, file, registry, clock
        self._history = StatisticsHistory(window_s)
        self._references: Sequence[Reference] = ()
        self._exported: set[SeriesKey] = set()
        self._is_used = False  # whether there ever was a report
        self._is_written = True  # whether the last snapshot was, or there was none

    def restore(self) -> None:
        """Go on with what the file has; of a damaged one nothing is used, which is logged."""
        try:
            snapshot = read_statistics(self._file)
        except ConfigError as error:
            log.error("%s", error.message, extra=fields(event="statistics_unreadable"))
            return
        if snapshot is not None:
            self._history.restore(snapshot)
            self._is_used = True

    def add(self, reports: Iterable[CountsReport]) -> None:
        """Add what a front end has counted since its last report."""
        for report in reports:
            self._is_used = True
            self._history.add([report])

    async def run(self) -> None:
        """Compare, export and write every few seconds, until cancelled; once more at the end."""
        try:
            while True:
                await asyncio.sleep(min(_MAX_INTERVAL_S, self._window_s / 4))
                await self.update()
        finally:
            if self._is_used:
                self._write(encode_statistics(self._snapshot()))

    async def update(self) -> None:
        """Compare all series with their references, as of now, export the drift, and write the file."""
        if not self._is_used:
            return
        if (references := await self._registry.references()) is not None:
            self._references = references
        snapshot = self._snapshot()
        self._export(snapshot.series)
        await asyncio.to_thread(self._write, encode_statistics(snapshot))

    def _snapshot(self) -> Snapshot:
        return self._history.snapshot(int(self._clock() / self._window_s), self._references)

    def _write(self, content: bytes) -> None:
        try:
            replace_private_file(self._file, content)
        except OSError as error:
            if self._is_written:
                log.error("%s: %s", self._file, error, extra=fields(event="statistics_not_written"))
            self._is_written = False
        else:
            self._is_written = True

    def _export(self, all_series: Sequence[Series]) -> None:
        """Set the gauges of drift; those of series without a reference are NaN if they ever had one."""
        drifts = {series.key: series.drift for series in all_series if series.drift is not None}
        for key in self._exported | drifts.keys():
            _set_gauges(key, drifts.get(key) or Drift(0, 0))
        self._exported |= drifts.keys()


def _set_gauges(key: SeriesKey, drift: Drift) -> None:
    for gauge, value in (
        (declarations.DRIFT_PSI, drift.psi),
        (declarations.DRIFT_KS, drift.ks),
        (declarations.DRIFT_JS, drift.js),
        (declarations.DRIFT_P_VALUE, drift.p_value),
    ):
        gauge.labels(*key).set(math.nan if value is None else value)
    unseen = sum(drift.unseen.values()) / drift.num_current if drift.num_current else math.nan
    declarations.DRIFT_UNSEEN.labels(*key).set(unseen)
