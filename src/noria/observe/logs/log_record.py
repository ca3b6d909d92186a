"""A line of the log: what it says, and how it is written as JSON or for people. Pure.

A line is a dictionary: `time`, `level`, `logger`, `process` and `message` first, then flat fields, `exception` last. Whatever a caller
has sent (a prompt, a path, a header) may stand in it; so nothing in a line may end it, begin another, or command a terminal, and no
secret is in it (`redaction.py`). A line is bounded: what is longer is cut, and says so.
"""

import functools
import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from noria.observe.logs.redaction import redact, redact_fields

Line = dict[str, object]

MAX_LINE_BYTES = 65_536
RESERVED = ("time", "level", "logger", "process", "message", "exception")
_MAX_TEXT_CHARS = 8192  # characters of a field
_MAX_LIST_ITEMS = 64
_MAX_EXCEPTION_CHARS = 24_576
_MAX_SCANNED_CHARS = 65_536  # so much of a text is looked through for secrets; the rest is cut off in any case
_MAX_SECRET_CHARS = 512  # half of one does not look like one, so so much before the rest goes with it

# What ends a line somewhere, moves a terminal's cursor, colours it, or turns the reading direction round.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_SURROGATES = re.compile("[\ud800-\udfff]")
TRUNCATION_MARK = "… [cut]"
_UNQUOTED = re.compile(r"[^\s\"'=\\]+")

_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}
EXCEPTION_INDENT = "    │ "
"""How the lines of an exception begin where people read them; no other line begins so."""


def fields(**named: object) -> dict[str, dict[str, object]]:
    """Fields of a line: `log.info("…", extra=fields(request_id=…))`. What is None is left out."""
    assert not set(named) & set(RESERVED), f"{sorted(set(named) & set(RESERVED))} are a line's own"
    return {"noria_fields": {name: value for name, value in named.items() if value is not None}}


def line_from_record(record: logging.LogRecord, process: str) -> Line:
    """What `record` says."""
    line = make_line(record.created, record.levelname.lower(), record.name, process, record.getMessage())
    extra_fields: dict[str, object] = getattr(record, "noria_fields", {})
    line |= {name: _to_json_value(value) for name, value in redact_fields(extra_fields).items()}
    if record.exc_info is not None and record.exc_info[1] is not None:
        traceback_text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        line["exception"] = _sanitize(traceback_text, _MAX_EXCEPTION_CHARS)
    return line


def make_line(time_s: float, level: str, logger: str, process: str, message: str) -> Line:
    """A line without fields yet; `time_s` is Unix time."""
    return {
        "time": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "process": process,
        "message": _sanitize(message),
    }


def unstructured_line(time_s: float, process: str, text: str, *, is_traceback: bool) -> Line:
    """The line of what a process wrote without our log: `text`, or a traceback of several lines if `is_fault`."""
    level = "error" if is_traceback else "warning"
    if not is_traceback:
        return make_line(time_s, level, "stderr", process, text)
    line = make_line(time_s, level, "stderr", process, text.rstrip().rpartition("\n")[2])
    return line | {"exception": _sanitize(text.rstrip(), _MAX_EXCEPTION_CHARS)}


def as_json(line: Mapping[str, object]) -> bytes:
    """One object on one line, without its end."""
    return _render_bounded(line, _render_json)


def _render_json(line: Mapping[str, object]) -> bytes:
    text = msgspec.json.encode(line).decode()  # which leaves what is above 0x1f as it is
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def as_text(line: Mapping[str, object], *, coloured: bool = False) -> bytes:
    """For people: one line, and one more for each of an exception, which begins with `INDENT`; without its end."""
    return _render_bounded(line, functools.partial(_render_text, coloured=coloured))


def _render_text(line: Mapping[str, object], *, coloured: bool) -> bytes:
    level = str(line["level"])
    prefix = f"{line['time']} {level.upper():<8} {_escape_unprintable(line['process'])} {_escape_unprintable(line['logger'])}: "
    extra_fields = [
        f"{name}={_format_value(value)}" for name, value in line.items() if name not in (*RESERVED, "event")
    ]
    text = prefix + "  ".join(
        [_escape_unprintable(line["message"]), *([" ".join(extra_fields)] if extra_fields else [])]
    )
    if "exception" in line:
        text += "".join(
            f"\n{EXCEPTION_INDENT}{_escape_unprintable(part)}" for part in str(line["exception"]).split("\n")
        )
    if coloured and level in _COLOURS:
        text = f"\x1b[{_COLOURS[level]}m{text}\x1b[0m"
    return text.encode()


Render = Callable[[Mapping[str, object]], bytes]


def _render_bounded(line: Mapping[str, object], render: Render) -> bytes:
    """`line` as `render` has it, all its values cut as far as it takes."""
    limit, rendered = _MAX_TEXT_CHARS, render(line)
    while len(rendered) > MAX_LINE_BYTES and limit > 1:
        limit //= 4
        line = {name: _truncate_value(value, limit) for name, value in line.items()}
        rendered = render(line)
    return rendered


def _truncate_value(value: object, limit: int) -> object:
    """Texts of some `longest` characters, and lists of so many."""
    match value:
        case str():
            return _truncate_text(value, limit)
        case list():
            kept = [_truncate_value(each, limit) for each in value[:limit]]
            return kept if len(kept) == len(value) else [*kept, TRUNCATION_MARK]
        case _:
            return value


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _escape_unprintable(text if _UNQUOTED.fullmatch(text) else msgspec.json.encode(text).decode())


def _escape_unprintable(value: object) -> str:
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(value))


def _to_json_value(value: object) -> object:
    """`value` as JSON has it: a number, a truth, or clean text; a list of them stays a list."""
    if not isinstance(value, list | tuple):
        return _to_json_scalar(value)
    kept = [_to_json_scalar(each) for each in value[:_MAX_LIST_ITEMS]]
    return kept if len(kept) == len(value) else [*kept, TRUNCATION_MARK]


def _to_json_scalar(value: object) -> object:
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else _sanitize(str(value))
        case float():
            return round(value, 6) if math.isfinite(value) else str(value)
        case _:
            return _sanitize(str(value))


def _sanitize(text: str, max_chars: int = _MAX_TEXT_CHARS) -> str:
    """Without secrets, of bounded length, and encodable."""
    max_scanned_chars = (
        _MAX_SCANNED_CHARS if "\n" in text else min(2 * max_chars, _MAX_SCANNED_CHARS)
    )  # of one line the end is not shown
    clean = redact(text[:max_scanned_chars])
    clean = _truncate_text(clean if len(text) <= max_scanned_chars else clean[:-_MAX_SECRET_CHARS], max_chars)
    return _SURROGATES.sub(lambda found: ascii(found[0])[1:-1], clean)


def _truncate_text(text: str, max_chars: int) -> str:
    """Some `longest` characters of `text`: the end of what has several lines is as telling as its beginning."""
    if len(text) <= max_chars:
        return text
    if "\n" not in text:
        return text[:max_chars] + TRUNCATION_MARK
    return text[: max_chars // 2] + f"\n{TRUNCATION_MARK}\n" + text[-(max_chars // 2) :]
