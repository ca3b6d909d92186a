"""Reads and writes traces: CSV with a header, one request a line, sorted by time.

Columns: `arrival_s` (seconds from the start), `steps`; optional `model`, `width`, `height`, `images`, `rows`,
`priority`, `deadline_s` (after the arrival). Empty values have the defaults of `workload.Shape`.
"""

import csv
import datetime
import pathlib
from collections.abc import Callable, Iterator, Mapping

from noria.errors import did_you_mean
from noria_bench.simulator.workload import Arrival, Shape, SimulateError, arrival_of

COLUMNS = ("arrival_s", "model", "width", "height", "steps", "images", "rows", "priority", "deadline_s")
_PRIORITIES = ("low", "normal", "high")

MAX_REQUESTS = 2_000_000  # which take 600 MB of memory, and the exact engine half an hour


def read_trace(file: pathlib.Path) -> Iterator[Arrival]:
    """Yield the requests of a trace. Raises SimulateError, which names the file and the line."""
    last_s = 0.0
    for line, row in _rows(file, ("arrival_s", "steps"), COLUMNS):
        reader = _Row(file, line, row)
        at_s = reader.number("arrival_s", None, 0.0, 1e9)
        if at_s < last_s:
            raise reader.error("arrival_s", f"a time that is not before that of the line above, {last_s:g}")
        last_s = at_s
        priority = row.get("priority") or "normal"
        if priority not in _PRIORITIES:
            raise reader.error("priority", "one of " + ", ".join(_PRIORITIES))
        yield Arrival(
            at_s,
            row.get("model") or "",
            reader.whole("width", Shape().width_px, 8, 16_384),
            reader.whole("height", Shape().height_px, 8, 16_384),
            reader.whole("steps", None, 1, 1000),
            reader.whole("images", 1, 1, 64),
            reader.whole("rows", Shape().rows, 1, 3),
            priority,
            reader.number("deadline_s", None, 0.001, 1e9) if row.get("deadline_s") else None,
        )


def write_trace(file: pathlib.Path, arrivals: Iterator[Arrival]) -> int:
    """Write a trace; return the number of its requests. Raises SimulateError."""
    num = 0
    try:
        with file.open("w", encoding="utf-8", newline="") as output:
            writer = csv.writer(output)
            writer.writerow(COLUMNS)
            for each in arrivals:
                writer.writerow(
                    [f"{each.at_s:.6g}" if each.at_s < 1 else f"{each.at_s:.3f}", each.model, each.width_px,
                     each.height_px, each.steps, each.images, each.rows, each.priority,
                     "" if each.deadline_s is None else each.deadline_s]
                )  # fmt: skip
                num += 1
    except OSError as error:
        raise SimulateError(f"{file} cannot be written: {error.strerror}") from error
    return num


def convert_gentd26(file: pathlib.Path) -> Iterator[Arrival]:
    """Yield the requests of Alibaba's GenTD26 (`alibaba/clusterdata`), sorted, from its first one on.

    Uses `gmt_create` (a time, or seconds), `num_inference_steps`, `num_images_per_prompt` and
    `checkpoint_model_version_id`; the size is 512 x 512 unless there are `width` and `height`.
    """
    found = []
    for line, row in _rows(file, ("gmt_create", "num_inference_steps")):
        reader = _Row(file, line, row)
        found.append(
            Arrival(
                reader.time("gmt_create"),
                row.get("checkpoint_model_version_id") or "",
                reader.whole("width", Shape().width_px, 8, 16_384),
                reader.whole("height", Shape().height_px, 8, 16_384),
                reader.whole("num_inference_steps", None, 1, 1000),
                reader.whole("num_images_per_prompt", 1, 1, 64),
            )
        )
    return _from_zero(found)


def convert_burstgpt(file: pathlib.Path) -> Iterator[Arrival]:
    """Yield a request of the default shape for each `Timestamp` (seconds) of BurstGPT: its arrivals are real."""
    found = [
        arrival_of(Shape(), _Row(file, line, row).number("Timestamp", None, 0.0, 1e12))
        for line, row in _rows(file, ("Timestamp",))
    ]
    return _from_zero(found)


CONVERTERS: Mapping[str, Callable[[pathlib.Path], Iterator[Arrival]]] = {
    "gentd26": convert_gentd26,
    "burstgpt": convert_burstgpt,
}


def _from_zero(found: list[Arrival]) -> Iterator[Arrival]:
    found.sort(key=lambda each: each.at_s)
    first_s = found[0].at_s if found else 0.0
    return (each._replace(at_s=each.at_s - first_s) for each in found)


def _rows(
    file: pathlib.Path, required: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row with its line. `allowed` are the columns that there may be; empty: any, as in public traces."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            columns = reader.fieldnames or []
            missing = [name for name in required if name not in columns]
            if missing:
                raise SimulateError(
                    f"{file} has no column {missing[0]}; its columns are {', '.join(columns) or 'none'}; "
                    f"a trace needs {' and '.join(required)}"
                )
            if unknown := [name for name in columns if allowed and name not in allowed]:
                raise SimulateError(
                    f"{file} has a column {unknown[0]!r}.{did_you_mean(unknown[0], allowed)} Columns are "
                    f"{', '.join(allowed)}"
                )
            if len(set(columns)) < len(columns):
                raise SimulateError(f"{file} has a column twice; its columns are {', '.join(columns)}")
            for number, row in enumerate(reader):
                if number == MAX_REQUESTS:
                    raise SimulateError(f"{file} has more than {MAX_REQUESTS} requests; cut it")
                if None in row or None in row.values():
                    raise SimulateError(f"{file}, line {reader.line_num}: expected {len(columns)} values")
                yield reader.line_num, row
    except OSError as error:
        raise SimulateError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SimulateError(f"{file} is no CSV in UTF-8: {error}") from error


class _Row:
    def __init__(self, file: pathlib.Path, line: int, row: Mapping[str, str]) -> None:
        self._file, self._line, self._row = file, line, row

    def error(self, column: str, allowed: str) -> SimulateError:
        value = self._row.get(column, "")[:40]
        return SimulateError(f"{self._file}, line {self._line}: {column} is {value!r}; it must be {allowed}")

    def number(self, column: str, default: float | None, low: float, high: float) -> float:
        text = self._row.get(column, "")
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise self.error(column, f"a number from {low:g} to {high:g}")
        return value

    def whole(self, column: str, default: int | None, low: int, high: int) -> int:
        value = self.number(column, default, low, high)
        if value != int(value):
            raise self.error(column, f"a whole number from {low} to {high}")
        return int(value)

    def time(self, column: str) -> float:
        text = self._row.get(column, "")
        try:
            return float(text)
        except ValueError:
            pass
        try:
            return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:
            raise self.error(column, "a time such as 2024-01-31 12:00:00, or seconds") from None
