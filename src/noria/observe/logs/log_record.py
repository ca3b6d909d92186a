"""A line of the log: made from a `logging.LogRecord`, and rendered as JSON or as text. Pure.

A line is a dictionary: `time`, `level`, `logger`, `process` and `message` first, then flat fields, `exception` last. It
may contain anything that a client sent (a prompt, a path, a header). So no value can end the line, begin another or
control a terminal, and secrets are removed (`redaction.py`). The size of a line is bounded; longer values are cut and
marked.
"""

import functools
import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

import msgspec

from noria.observe.logs.redaction import is_suspicious, redact, redact_fields
from noria.observe.terminal_text import escape_in_json, escape_unprintable

Line = dict[str, object]

MAX_LINE_BYTES = 65_536
RESERVED = ("time", "level", "logger", "process", "message", "exception")
_MAX_TEXT_CHARS = 8192  # characters of a field
_MAX_LIST_ITEMS = 64
_MAX_EXCEPTION_CHARS = 24_576
# Only this much of a text is scanned for secrets; the rest is cut off in any case.
_MAX_SCANNED_CHARS = 65_536
# Half of a secret is not recognised, so this much before the cut is dropped as well.
_MAX_SECRET_CHARS = 512

_SURROGATES = re.compile("[\ud800-\udfff]")
TRUNCATION_MARK = "… [cut]"
_UNQUOTED = re.compile(r"[^\s\"'=\\]+")

_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}
_MAX_INT_BITS = 1024  # a larger integer is written as its number of bits
EXCEPTION_INDENT = "    │ "
"""Begins each line of an exception in text format; no other line begins with it."""


def fields(**named: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call: `log.info("…", extra=fields(request_id=…))`.

    Fields that are None are left out.
    """
    assert not set(named) & set(RESERVED), f"{sorted(set(named) & set(RESERVED))} are reserved"
    return {"noria_fields": {name: value for name, value in named.items() if value is not None}}


def line_from_record(record: logging.LogRecord, process: str) -> Line:
    """Return the line of `record`."""
    named = getattr(record, "noria_fields", {})
    line = line_of(record.created, record.levelname.lower(), record.name, process, record.getMessage(), named)
    if record.exc_info is not None and record.exc_info[1] is not None:
        traceback_text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        line["exception"] = _sanitize(traceback_text, _MAX_EXCEPTION_CHARS)
    return line


def line_of(
    time_s: float,
    level: str,
    logger: str,
    process: str,
    message: str,
    named: Mapping[str, object] = MappingProxyType({}),
) -> Line:
    """Return a line with the fields `named` that are not None; `time_s` is Unix time."""
    named = redact_fields(named)
    line: Line = {"time": _utc(time_s), "level": level, "logger": logger, "process": process, "message": message}
    texts = [message]
    for name, value in named.items():  # most are plain texts and finite numbers
        kind = type(value)
        if kind is str:
            line[name] = value
            texts.append(value)  # type: ignore[arg-type]
        elif kind is float and -1e9 < value < 1e9:  # type: ignore[operator]
            line[name] = round(value * 1e6) / 1e6  # type: ignore[operator]  # a third of the time of round(value, 6)
        elif kind is int and -(2**63) <= value < 2**63:  # type: ignore[operator]
            line[name] = value
        elif value is not None:
            line[name] = _to_json_value(value)
    # One search of all texts instead of one for each; a pattern matches no line end.
    joined = "\n".join(texts)
    if len(joined) > _MAX_TEXT_CHARS or not joined.isascii() or is_suspicious(joined):
        line["message"] = _sanitize(message)
        line.update({name: _sanitize(value) for name, value in named.items() if type(value) is str})
    return line


def _utc(time_s: float) -> str:
    """Format Unix time to the millisecond, rounded down, in UTC."""
    second, microseconds = divmod(round(time_s * 1e6), 1_000_000)
    return f"{_utc_second(second)}.{microseconds // 1000:03d}Z"


@functools.lru_cache(maxsize=2)
def _utc_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def unstructured_line(time_s: float, process: str, text: str, *, is_traceback: bool) -> Line:
    """Return the line of `text` that a process printed: one line, or, with `is_traceback`, a traceback of several."""
    level = "error" if is_traceback else "warning"
    if not is_traceback:
        return line_of(time_s, level, "stderr", process, text)
    line = line_of(time_s, level, "stderr", process, text.rstrip().rpartition("\n")[2])
    return line | {"exception": _sanitize(text.rstrip(), _MAX_EXCEPTION_CHARS)}


def as_json(line: Mapping[str, object]) -> bytes:
    """Render a line as a JSON object on one line, without the line end."""
    rendered = _render_json(line)
    return rendered if len(rendered) <= MAX_LINE_BYTES else _render_bounded(line, _render_json)


def _render_json(line: Mapping[str, object]) -> bytes:
    encoded = msgspec.json.encode(line)  # escapes only up to 0x1f
    if encoded.isascii() and b"\x7f" not in encoded:  # most lines
        return encoded
    text = encoded.decode()
    return escape_in_json(text).encode()


def as_text(line: Mapping[str, object], *, coloured: bool = False) -> bytes:
    """Render a line as text: one line, and one for each of the exception, with `EXCEPTION_INDENT`.

    Without the line end.
    """
    return _render_bounded(line, functools.partial(_render_text, coloured=coloured))


def _render_text(line: Mapping[str, object], *, coloured: bool) -> bytes:
    level = str(line["level"])
    prefix = f"{line['time']} {level.upper():<8} {escape_unprintable(str(line['process']))} "
    prefix += f"{escape_unprintable(str(line['logger']))}: "
    extra_fields = [
        f"{name}={_format_value(value)}" for name, value in line.items() if name not in (*RESERVED, "event")
    ]
    text = prefix + "  ".join(
        [escape_unprintable(str(line["message"])), *([" ".join(extra_fields)] if extra_fields else [])]
    )
    if "exception" in line:
        text += "".join(
            f"\n{EXCEPTION_INDENT}{escape_unprintable(part)}" for part in str(line["exception"]).split("\n")
        )
    if coloured and level in _COLOURS:
        text = f"\x1b[{_COLOURS[level]}m{text}\x1b[0m"
    return text.encode()


Render = Callable[[Mapping[str, object]], bytes]


def _render_bounded(line: Mapping[str, object], render: Render) -> bytes:
    """Render `line`, with all values cut as far as needed to fit `MAX_LINE_BYTES`."""
    limit, rendered = _MAX_TEXT_CHARS, render(line)
    while len(rendered) > MAX_LINE_BYTES and limit > 1:
        limit //= 4
        line = {name: _truncate_value(value, limit) for name, value in line.items()}
        rendered = render(line)
    return rendered


def _truncate_value(value: object, limit: int) -> object:
    """Cut a text to about `limit` characters, a list to `limit` items."""
    match value:
        case str():
            return _truncate_text(value, limit)
        case list():
            kept = [_truncate_value(each, limit) for each in value[:limit]]
            return kept if len(kept) == len(value) else [*kept, TRUNCATION_MARK]
        case _:
            return value


def _format_value(value: object) -> str:
    if isinstance(value, list) and value:
        return ",".join(_format_value(each) for each in value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return escape_unprintable(text if _UNQUOTED.fullmatch(text) else msgspec.json.encode(text).decode())


def _to_json_value(value: object) -> object:
    """Return `value` as a JSON number, boolean or sanitised text, or a list of these."""
    if isinstance(value, str):  # most fields
        return _sanitize(value)
    if not isinstance(value, list | tuple):
        return _to_json_scalar(value)
    kept = [_to_json_scalar(each) for each in value[:_MAX_LIST_ITEMS]]
    return kept if len(kept) == len(value) else [*kept, TRUNCATION_MARK]


def _to_json_scalar(value: object) -> object:
    match value:
        case None | bool():
            return value
        case int():
            if -(2**63) <= value < 2**63:
                return value
            bits = value.bit_length()  # Python writes no integer of more than 4,300 digits
            return _sanitize(str(value)) if bits <= _MAX_INT_BITS else f"an integer of {bits} bits"
        case float():
            return round(value, 6) if math.isfinite(value) else str(value)
        case _:
            return _sanitize(str(value))


def _sanitize(text: str, max_chars: int = _MAX_TEXT_CHARS) -> str:
    """Remove secrets from `text`, limit its length and escape surrogates, which cannot be encoded."""
    # The end of a single line is not shown, so it need not be scanned.
    max_scanned_chars = _MAX_SCANNED_CHARS if "\n" in text else min(2 * max_chars, _MAX_SCANNED_CHARS)
    clean = redact(text[:max_scanned_chars])
    clean = _truncate_text(clean if len(text) <= max_scanned_chars else clean[:-_MAX_SECRET_CHARS], max_chars)
    return clean if clean.isascii() else _SURROGATES.sub(lambda found: ascii(found[0])[1:-1], clean)


def _truncate_text(text: str, max_chars: int) -> str:
    """Cut `text` to about `max_chars` characters: a single line at its end, several lines in the middle."""
    if len(text) <= max_chars:
        return text
    if "\n" not in text:
        return text[:max_chars] + TRUNCATION_MARK
    return text[: max_chars // 2] + f"\n{TRUNCATION_MARK}\n" + text[-(max_chars // 2) :]
