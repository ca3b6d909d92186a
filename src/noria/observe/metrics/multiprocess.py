"""Renders the values of several processes: the output of prometheus_client's multiprocess collector, but faster.

Each process keeps its values in files of its own (`mmap_format.py`). Entries are only appended, so parsed keys are
kept: a scrape reads numbers and parses only new keys. The counts of ended processes are in one file per kind
(`dead_processes.py`), so the time depends on the number of running processes. Gauge files are removed with their
process, and a process id may be reused, so these short files are always parsed completely.

Only the gauge modes that `declarations.py` uses are supported.
"""

import contextlib
import math
import os
import pathlib
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from noria.observe.metrics.dead_processes import is_merged, read_lock
from noria.observe.metrics.exemplars import Exemplars, escape_label_value
from noria.observe.metrics.mmap_format import HEADER_BYTES, decode_key, iter_entries, read_used_bytes


class _Series(NamedTuple):
    """One line of the output without its value."""

    kind: str  # counter, gauge or histogram
    family: str
    name: str
    labels: dict[str, str]
    help: str


@dataclass
class _FileState:
    """What has been parsed of a file."""

    used_bytes: int = HEADER_BYTES
    series_ids: list[int] = field(default_factory=list)  # of the entries, in order
    value_indices: list[int] = field(default_factory=list)  # of their values, in doubles from the start of the file


@dataclass
class _HistogramSeries:
    """A histogram with one set of labels."""

    sum_line: str = ""
    sum_id: int = 0
    count_line: str = ""
    buckets: list[tuple[float, int, str, frozenset[tuple[str, str]]]] = field(default_factory=list)


@dataclass
class _Family:
    """A metric: its lines without values."""

    series: _Series
    lines: list[tuple[str, int]] = field(default_factory=list)
    histograms: dict[tuple[tuple[str, str], ...], _HistogramSeries] = field(default_factory=dict)


class MultiprocessReader:
    """Reads the values in `folder`; kept over all scrapes of a front end."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)
        self._lock = threading.Lock()  # scrapes run in threads
        self._series_ids: dict[bytes, int] = {}  # by key
        self._families: dict[str, _Family] = {}
        self._files: dict[str, _FileState] = {}
        self._merged_files: list[str] = []  # their names at the last read

    def text(self, exemplars: Exemplars | None) -> str:
        """Return all values: in OpenMetrics, without its end mark, if `exemplars` are given.

        Else in Prometheus' text format.
        """
        with self._lock:
            totals, gauges = self._read()
            parts: list[str] = []
            for family in self._families.values():
                lines = list(_lines(family, totals, gauges, exemplars))
                if lines:
                    parts.append(_format_header(family.series, openmetrics=exemplars is not None))
                    parts += lines
            return "".join(parts)

    def _read(self) -> tuple[list[float], dict[int, float]]:
        """Return the sums of counters and histograms, indexed by series id, and the values of gauges by series id."""
        parts: list[tuple[list[int], tuple[float, ...]]] = []
        gauges: dict[int, float] = {}
        for name, content in self._contents():
            kind, *mode = name.split("_")[:-1]
            file_state = self._parse_file(name, kind, content)
            values = _values(content, file_state)
            if kind != "gauge":
                parts.append((file_state.series_ids, values))
                continue
            for series_id, value in zip(file_state.series_ids, values, strict=True):
                previous = gauges.get(series_id)
                if previous is None:
                    gauges[series_id] = value
                else:
                    gauges[series_id] = max(previous, value) if mode == ["livemax"] else previous + value
        addends: list[list[float]] = [[] for _ in self._series_ids]
        for series_ids, values in parts:
            for series_id, value in zip(series_ids, values, strict=True):
                addends[series_id].append(value)
        return list(map(math.fsum, addends)), gauges  # exact, so that the order of the files cannot make a sum smaller

    def _contents(self) -> list[tuple[str, bytes]]:
        """Return the names and contents of all files that are not empty."""
        contents = []
        with read_lock(self._folder):
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".db"))
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a gauge whose process has just ended
                    contents.append((name, read_used_bytes(self._folder / name)))
        merged_files = [name for name in names if is_merged(name)]
        if merged_files != self._merged_files:  # then files are gone, and new ones may have their names
            self._merged_files = merged_files
            self._files.clear()
        return [(name, content) for name, content in contents if content]

    def _parse_file(self, name: str, kind: str, content: bytes) -> _FileState:
        """Return the state of a file with this content.

        A file with an invalid end is parsed from its start next time.
        """
        file_state = self._files.pop(name, None)
        if file_state is None or file_state.used_bytes > len(content):
            file_state = _FileState()
        self._parse_new_entries(kind, file_state, content)
        if kind != "gauge" and file_state.used_bytes == len(content):
            self._files[name] = file_state
        return file_state

    def _parse_new_entries(self, kind: str, file_state: _FileState, content: bytes) -> None:
        """Parse the entries appended since the last read, up to the first invalid one."""
        for key, value_offset in iter_entries(content, file_state.used_bytes):
            series_id = self._series_ids.get(key)
            if series_id is None:
                decoded_key = decode_key(key)
                if decoded_key is None:
                    return
                series_id = self._series_ids[key] = len(self._series_ids)
                self._add_series(_Series(kind, *decoded_key), series_id)
            file_state.series_ids.append(series_id)
            file_state.value_indices.append(value_offset // 8)
            file_state.used_bytes = value_offset + 16

    def _add_series(self, series: _Series, series_id: int) -> None:
        """Add the line of a new series to its family."""
        family = self._families.setdefault(series.family, _Family(series))
        if series.kind != "histogram":
            family.lines.append((_line_prefix(series.name, series.labels), series_id))
            return
        labels = dict(series.labels)
        upper_bound = labels.pop("le", None)
        histogram = family.histograms.setdefault(tuple(sorted(labels.items())), _HistogramSeries())
        if upper_bound is None:
            histogram.sum_line, histogram.sum_id = _line_prefix(series.name, labels), series_id
            histogram.count_line = _line_prefix(f"{series.family}_count", labels)
            return
        labels["le"] = floatToGoString(upper_bound)  # type: ignore[no-untyped-call]
        line = _line_prefix(f"{series.family}_bucket", labels)
        histogram.buckets.append((float(upper_bound), series_id, line, frozenset(labels.items())))
        histogram.buckets.sort(key=itemgetter(0))


def _lines(
    family: _Family, totals: list[float], gauges: dict[int, float], exemplars: Exemplars | None
) -> Iterator[str]:
    """Yield the family's lines with values. A gauge whose processes have all ended has none."""
    if family.series.kind == "gauge":
        yield from (
            f"{line}{_format_number(gauges[series_id])}\n" for line, series_id in family.lines if series_id in gauges
        )
        return
    yield from (f"{line}{_format_number(totals[series_id])}\n" for line, series_id in family.lines)
    name = f"{family.series.family}_bucket"
    for histogram in family.histograms.values():
        yield f"{histogram.sum_line}{_format_number(totals[histogram.sum_id])}\n"
        total = 0.0
        for _, series_id, line, labels in histogram.buckets:
            total += totals[series_id]
            exemplar_text = "" if exemplars is None else exemplars.openmetrics_suffix(name, labels)
            yield f"{line}{_format_number(total)}{exemplar_text}\n"
        yield f"{histogram.count_line}{_format_number(total)}\n"


def _values(content: bytes, file_state: _FileState) -> tuple[float, ...]:
    """Return the values of all entries, in order."""
    if len(file_state.value_indices) < 2:
        return tuple(struct.unpack_from("d", content, 8 * index)[0] for index in file_state.value_indices)
    doubles = memoryview(content)[: len(content) // 8 * 8].cast("d")
    values: tuple[float, ...] = itemgetter(*file_state.value_indices)(doubles)
    return values


def _format_number(value: float) -> str:
    """Format a number as Go does, which is also the format of bucket bounds."""
    if 0.0 <= value < 1e6 or math.isnan(value):
        return repr(value) if value == value else "NaN"  # noqa: PLR0124 - NaN
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _format_header(series: _Series, *, openmetrics: bool) -> str:
    """Return a family's header. Only the text format has `_total` in a counter's name and leaves quotes unescaped."""
    name = series.family if openmetrics or series.kind != "counter" else f"{series.family}_total"
    help_text = series.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        help_text = help_text.replace('"', r"\"")
    return f"# HELP {name} {help_text}\n# TYPE {name} {series.kind}\n"


def _line_prefix(name: str, labels: dict[str, str]) -> str:
    """Return a line up to its value."""
    if not labels:
        return f"{name} "
    pairs = ",".join(f'{label}="{escape_label_value(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}} "
