"""Sums and renders the values of several processes, as prometheus_client's multiprocess collector does, but faster.

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
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from noria.observe.metrics.dead_processes import is_merged, read_lock
from noria.observe.metrics.exemplars import Exemplars, escape_label_value
from noria.observe.metrics.mmap_format import HEADER_BYTES, Key, decode_key, iter_entries, read_used_bytes


class _Line(NamedTuple):
    name: str
    labels: frozenset[tuple[str, str]]
    text: str  # up to the value
    series_id: int


@dataclass
class _LabelSet:
    """The lines of a family that differ in no label but `le`: one, or those of a histogram."""

    lines: list[_Line] = field(default_factory=list)  # a counter's, a gauge's or that of a histogram's sum
    buckets: list[tuple[float, _Line]] = field(default_factory=list)  # with their upper bounds, in ascending order
    count: _Line | None = None  # the line of a histogram with buckets


@dataclass
class _Family:
    name: str
    kind: str  # counter, gauge or histogram
    help: str
    label_sets: dict[frozenset[tuple[str, str]], _LabelSet] = field(default_factory=dict)


@dataclass
class _FileState:
    used_bytes: int = HEADER_BYTES
    series_ids: list[int] = field(default_factory=list)  # series of the entries, in order
    value_indices: list[int] = field(default_factory=list)  # offsets of their values, in doubles from the file's start


class MultiprocessReader:
    """Reads the values in `folder`; kept over all scrapes of a front end."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)
        self._lock = threading.Lock()  # scrapes run in threads
        self._series_ids: dict[bytes, int] = {}  # by key
        self._families: dict[str, _Family] = {}
        self._files: dict[str, _FileState] = {}
        self._merged_files: list[str] = []  # their names at the last read

    def samples(self) -> list[Sample]:
        """Return all values."""
        with self._lock:
            values = self._read()
            return [
                Sample(line.name, dict(line.labels), value)
                for family in self._families.values()
                for line, value in _with_values(family, values)
            ]

    def text(self, exemplars: Exemplars | None) -> str:
        """Return all values: in OpenMetrics, without its end mark, if `exemplars` are given.

        Else in Prometheus' text format.
        """
        with self._lock:
            values = self._read()
            parts: list[str] = []
            for family in self._families.values():
                lines = [
                    f"{line.text}{_format_number(value)}"
                    f"{'' if exemplars is None else exemplars.openmetrics_suffix(line.name, line.labels)}\n"
                    for line, value in _with_values(family, values)
                ]
                if lines:
                    parts.append(_format_header(family, openmetrics=exemplars is not None))
                    parts += lines
            return "".join(parts)

    def _read(self) -> list[float | None]:
        """Return the values of all processes together, by series id; None if no process has the series now."""
        files = [(name, content, self._parse_file(name, content)) for name, content in self._contents()]
        addends: list[list[float]] = [[] for _ in self._series_ids]
        for name, content, file_state in files:
            doubles = memoryview(content)[: len(content) // 8 * 8].cast("d")
            values = map(doubles.__getitem__, file_state.value_indices)
            for series_id, value in zip(file_state.series_ids, values, strict=True):
                addends[series_id].append(value)
            if name.startswith("gauge_livemax_"):
                for series_id in file_state.series_ids:
                    addends[series_id] = [max(addends[series_id])]
        # Exact, so that the order of the files cannot make a sum smaller.
        return [math.fsum(parts) if parts else None for parts in addends]

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

    def _parse_file(self, name: str, content: bytes) -> _FileState:
        """Return the state of a file with this content, parsed up to the first invalid entry."""
        kind = name.partition("_")[0]
        file_state = _FileState() if kind == "gauge" else self._files.setdefault(name, _FileState())
        if file_state.used_bytes > len(content):
            file_state = self._files[name] = _FileState()
        for key, value_offset in iter_entries(content, file_state.used_bytes):
            series_id = self._series_ids.get(key)
            if series_id is None:
                decoded_key = decode_key(key)
                if decoded_key is None:
                    break
                series_id = self._series_ids[key] = len(self._series_ids)
                self._add_series(kind, decoded_key, series_id)
            file_state.series_ids.append(series_id)
            file_state.value_indices.append(value_offset // 8)
            file_state.used_bytes = value_offset + 16
        return file_state

    def _add_series(self, kind: str, key: Key, series_id: int) -> None:
        """Add the line of a new series to its family."""
        family_name, name, labels, help_text = key
        family = self._families.setdefault(family_name, _Family(family_name, kind, help_text))
        line = _line(name, labels, series_id)
        upper_bound = labels.pop("le", None)
        label_set = family.label_sets.setdefault(frozenset(labels.items()), _LabelSet())
        if upper_bound is None:
            label_set.lines.append(line)
            return
        label_set.buckets.append((float(upper_bound), line))
        label_set.buckets.sort(key=itemgetter(0))
        label_set.count = _line(f"{family_name}_count", labels, series_id)


def _with_values(family: _Family, values: list[float | None]) -> Iterator[tuple[_Line, float]]:
    """Yield the family's lines that have a value; a gauge whose processes have all ended has none."""
    for label_set in family.label_sets.values():
        for line in label_set.lines:
            if (value := values[line.series_id]) is not None:
                yield line, value
        total = 0.0
        for _, line in label_set.buckets:
            total += values[line.series_id] or 0.0
            yield line, total
        if label_set.count is not None:
            yield label_set.count, total


def _format_number(value: float) -> str:
    """Format a number as Go does, which is also the format of bucket bounds."""
    if 0.0 <= value < 1e6:  # nearly all: half the time
        return repr(value)
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _format_header(family: _Family, *, openmetrics: bool) -> str:
    """Return a family's header. Only the text format has `_total` in a counter's name and leaves quotes unescaped."""
    name = family.name if openmetrics or family.kind != "counter" else f"{family.name}_total"
    help_text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        help_text = help_text.replace('"', r"\"")
    return f"# HELP {name} {help_text}\n# TYPE {name} {family.kind}\n"


def _line(name: str, labels: dict[str, str], series_id: int) -> _Line:
    pairs = ",".join(f'{label}="{escape_label_value(value)}"' for label, value in sorted(labels.items()))
    return _Line(name, frozenset(labels.items()), f"{name}{{{pairs}}} " if labels else f"{name} ", series_id)
