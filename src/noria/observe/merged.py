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

from noria.observe.ended import is_folded, reading
from noria.observe.entries import FIRST, decoded, entries, written
from noria.observe.exemplars import Exemplars, escaped


class _Series(NamedTuple):
    """One line of the answer, but for its value."""

    kind: str  # counter, gauge or histogram
    family: str
    name: str
    labels: dict[str, str]
    help: str


@dataclass
class _File:
    """What was read of a file."""

    used: int = FIRST  # bytes of it
    cells: list[int] = field(default_factory=list)  # of its entries
    places: list[int] = field(default_factory=list)  # of their values, in doubles from the file's start


@dataclass
class _Group:
    """A histogram under one set of labels."""

    sum_line: str = ""
    sum_cell: int = 0
    count_line: str = ""
    buckets: list[tuple[float, int, str, frozenset[tuple[str, str]]]] = field(default_factory=list)


@dataclass
class _Family:
    """A metric: its lines without their values."""

    series: _Series
    lines: list[tuple[str, int]] = field(default_factory=list)
    groups: dict[tuple[tuple[str, str], ...], _Group] = field(default_factory=dict)


class Merged:
    """The values in `folder`, through all scrapes of one front end."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)
        self._lock = threading.Lock()  # scrapes run in threads
        self._cells: dict[bytes, int] = {}  # by key
        self._families: dict[str, _Family] = {}
        self._files: dict[str, _File] = {}
        self._folded: list[str] = []  # names of the files that were so when last read

    def text(self, exemplars: Exemplars | None) -> str:
        """All values: in OpenMetrics, but for its end, with `exemplars`; in Prometheus' text format without."""
        with self._lock:
            counted, gauges = self._read()
            parts: list[str] = []
            for family in self._families.values():
                lines = list(_lines(family, counted, gauges, exemplars))
                if lines:
                    parts.append(_head(family.series, openmetrics=exemplars is not None))
                    parts += lines
            return "".join(parts)

    def _read(self) -> tuple[list[float], dict[int, float]]:
        """Sums of what is counted, by cell; and what gauges show."""
        parts: list[tuple[list[int], tuple[float, ...]]] = []
        gauges: dict[int, float] = {}
        for name, content in self._contents():
            kind, *mode = name.split("_")[:-1]
            known = self._known(name, kind, content)
            values = _values(content, known)
            if kind != "gauge":
                parts.append((known.cells, values))
                continue
            for cell, value in zip(known.cells, values, strict=True):
                before = gauges.get(cell)
                if before is None:
                    gauges[cell] = value
                else:
                    gauges[cell] = max(before, value) if mode == ["livemax"] else before + value
        counted: list[list[float]] = [[] for _ in self._cells]
        for cells, values in parts:
            for cell, value in zip(cells, values, strict=True):
                counted[cell].append(value)
        return list(map(math.fsum, counted)), gauges  # exact: no order of them shows less than another

    def _contents(self) -> list[tuple[str, bytes]]:
        """All files that say something, by name."""
        found = []
        with reading(self._folder):
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".db"))
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a gauge, whose process has ended just now
                    found.append((name, written(self._folder / name)))
        folded = [name for name in names if is_folded(name)]
        if folded != self._folded:  # then files have gone, and others may have come under their names
            self._folded = folded
            self._files.clear()
        return [(name, content) for name, content in found if content]

    def _known(self, name: str, kind: str, content: bytes) -> _File:
        """What is known of a file, now that this is in it. One that cannot be read to its end is read from its beginning next time."""
        known = self._files.pop(name, None)
        if known is None or known.used > len(content):
            known = _File()
        self._note_new(kind, known, content)
        if kind != "gauge" and known.used == len(content):
            self._files[name] = known
        return known

    def _note_new(self, kind: str, known: _File, content: bytes) -> None:
        """Parse the entries that have come since the file was last read, up to one that is none."""
        for key, place in entries(content, known.used):
            cell = self._cells.get(key)
            if cell is None:
                found = decoded(key)
                if found is None:
                    return
                cell = self._cells[key] = len(self._cells)
                self._add(_Series(kind, *found), cell)
            known.cells.append(cell)
            known.places.append(place // 8)
            known.used = place + 16

    def _add(self, series: _Series, cell: int) -> None:
        """Find the line of a new series its place."""
        family = self._families.setdefault(series.family, _Family(series))
        if series.kind != "histogram":
            family.lines.append((_line(series.name, series.labels), cell))
            return
        labels = dict(series.labels)
        bound = labels.pop("le", None)
        group = family.groups.setdefault(tuple(sorted(labels.items())), _Group())
        if bound is None:
            group.sum_line, group.sum_cell = _line(series.name, labels), cell
            group.count_line = _line(f"{series.family}_count", labels)
            return
        labels["le"] = floatToGoString(bound)  # type: ignore[no-untyped-call]
        line = _line(f"{series.family}_bucket", labels)
        group.buckets.append((float(bound), cell, line, frozenset(labels.items())))
        group.buckets.sort(key=itemgetter(0))


def _lines(
    family: _Family, counted: list[float], gauges: dict[int, float], exemplars: Exemplars | None
) -> Iterator[str]:
    """The family's lines, with values. A gauge whose processes have all ended has none."""
    if family.series.kind == "gauge":
        yield from (f"{line}{_number(gauges[cell])}\n" for line, cell in family.lines if cell in gauges)
        return
    yield from (f"{line}{_number(counted[cell])}\n" for line, cell in family.lines)
    name = f"{family.series.family}_bucket"
    for group in family.groups.values():
        yield f"{group.sum_line}{_number(counted[group.sum_cell])}\n"
        total = 0.0
        for _, cell, line, labels in group.buckets:
            total += counted[cell]
            example = "" if exemplars is None else exemplars.words(name, labels)
            yield f"{line}{_number(total)}{example}\n"
        yield f"{group.count_line}{_number(total)}\n"


def _values(content: bytes, known: _File) -> tuple[float, ...]:
    """The values of all entries, in their order."""
    if len(known.places) < 2:
        return tuple(struct.unpack_from("d", content, 8 * place)[0] for place in known.places)
    doubles = memoryview(content)[: len(content) // 8 * 8].cast("d")
    found: tuple[float, ...] = itemgetter(*known.places)(doubles)
    return found


def _number(value: float) -> str:
    """As Go writes it, in whose form buckets are named."""
    if 0.0 <= value < 1e6 or math.isnan(value):
        return repr(value) if value == value else "NaN"  # noqa: PLR0124 - NaN
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _head(series: _Series, *, openmetrics: bool) -> str:
    """What a family begins with; a counter's name has its `_total` only in the text format, which alone leaves quotes as they are."""
    name = series.family if openmetrics or series.kind != "counter" else f"{series.family}_total"
    said = series.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        said = said.replace('"', r"\"")
    return f"# HELP {name} {said}\n# TYPE {name} {series.kind}\n"


def _line(name: str, labels: dict[str, str]) -> str:
    """A line up to its value."""
    if not labels:
        return f"{name} "
    pairs = ",".join(f'{label}="{escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}} "
