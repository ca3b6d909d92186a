"""The values of several processes as one text: what prometheus_client's multiprocess collector and its writers give, sooner.

Each process keeps its values in files of its own (`entries.py`). Entries only ever come after those before, so what was read of a key is
kept: a scrape reads numbers, and parses only keys that are new. What processes that have ended had counted is in one file of each kind
(`ended.py`), so time goes with the processes that live. Gauges' files go with their processes, and a process id may come again, so
those are read whole; they are short.

Of prometheus_client's gauges only the modes are known that `metrics.py` declares.
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
    """One line of the answer, but for its value."""

    kind: str  # counter, gauge or histogram
    family: str
    name: str
    labels: dict[str, str]
    help: str


@dataclass
class _FileState:
    """What was read of a file."""

    used_bytes: int = HEADER_BYTES  # bytes of it
    series_ids: list[int] = field(default_factory=list)  # of its entries
    value_indices: list[int] = field(default_factory=list)  # of their values, in doubles from the file's start


@dataclass
class _HistogramSeries:
    """A histogram under one set of labels."""

    sum_line: str = ""
    sum_id: int = 0
    count_line: str = ""
    buckets: list[tuple[float, int, str, frozenset[tuple[str, str]]]] = field(default_factory=list)


@dataclass
class _Family:
    """A metric: its lines without their values."""

    series: _Series
    lines: list[tuple[str, int]] = field(default_factory=list)
    histograms: dict[tuple[tuple[str, str], ...], _HistogramSeries] = field(default_factory=dict)


class MultiprocessReader:
    """The values in `folder`, through all scrapes of one front end."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)
        self._lock = threading.Lock()  # scrapes run in threads
        self._series_ids: dict[bytes, int] = {}  # by key
        self._families: dict[str, _Family] = {}
        self._files: dict[str, _FileState] = {}
        self._merged_files: list[str] = []  # names of the files that were so when last read

    def text(self, exemplars: Exemplars | None) -> str:
        """All values: in OpenMetrics, but for its end, with `exemplars`; in Prometheus' text format without."""
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
        """Sums of what is counted, by cell; and what gauges show."""
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
        return list(map(math.fsum, addends)), gauges  # exact: no order of them shows less than another

    def _contents(self) -> list[tuple[str, bytes]]:
        """All files that say something, by name."""
        contents = []
        with read_lock(self._folder):
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".db"))
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a gauge, whose process has ended just now
                    contents.append((name, read_used_bytes(self._folder / name)))
        merged_files = [name for name in names if is_merged(name)]
        if merged_files != self._merged_files:  # then files have gone, and others may have come under their names
            self._merged_files = merged_files
            self._files.clear()
        return [(name, content) for name, content in contents if content]

    def _parse_file(self, name: str, kind: str, content: bytes) -> _FileState:
        """What is known of a file, now that this is in it. One that cannot be read to its end is read from its beginning next time."""
        file_state = self._files.pop(name, None)
        if file_state is None or file_state.used_bytes > len(content):
            file_state = _FileState()
        self._parse_new_entries(kind, file_state, content)
        if kind != "gauge" and file_state.used_bytes == len(content):
            self._files[name] = file_state
        return file_state

    def _parse_new_entries(self, kind: str, file_state: _FileState, content: bytes) -> None:
        """Parse the entries that have come since the file was last read, up to one that is none."""
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
        """Find the line of a new series its place."""
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
    """The family's lines, with values. A gauge whose processes have all ended has none."""
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
    """The values of all entries, in their order."""
    if len(file_state.value_indices) < 2:
        return tuple(struct.unpack_from("d", content, 8 * index)[0] for index in file_state.value_indices)
    doubles = memoryview(content)[: len(content) // 8 * 8].cast("d")
    values: tuple[float, ...] = itemgetter(*file_state.value_indices)(doubles)
    return values


def _format_number(value: float) -> str:
    """As Go writes it, in whose form buckets are named."""
    if 0.0 <= value < 1e6 or math.isnan(value):
        return repr(value) if value == value else "NaN"  # noqa: PLR0124 - NaN
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _format_header(series: _Series, *, openmetrics: bool) -> str:
    """What a family begins with; a counter's name has its `_total` only in the text format, which alone leaves quotes as they are."""
    name = series.family if openmetrics or series.kind != "counter" else f"{series.family}_total"
    help_text = series.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        help_text = help_text.replace('"', r"\"")
    return f"# HELP {name} {help_text}\n# TYPE {name} {series.kind}\n"


def _line_prefix(name: str, labels: dict[str, str]) -> str:
    """A line up to its value."""
    if not labels:
        return f"{name} "
    pairs = ",".join(f'{label}="{escape_label_value(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}} "
