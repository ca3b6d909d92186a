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

from noria.observe.redaction import redacted, redacted_fields

Line = dict[str, object]

LONGEST_LINE_BYTES = 65_536
RESERVED = ("time", "level", "logger", "process", "message", "exception")
_LONGEST_TEXT = 8192  # characters of a field
_LONGEST_LIST = 64
_LONGEST_EXCEPTION = 24_576
_LONGEST_READ = 65_536  # so much of a text is looked through for secrets; the rest is cut off in any case
_LONGEST_SECRET = 512  # half of one does not look like one, so so much before the rest goes with it

# What ends a line somewhere, moves a terminal's cursor, colours it, or turns the reading direction round.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_SURROGATES = re.compile("[\ud800-\udfff]")
CUT = "… [cut]"
_BARE = re.compile(r"[^\s\"'=\\]+")

_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}
INDENT = "    │ "
"""How the lines of an exception begin where people read them; no other line begins so."""


def fields(**named: object) -> dict[str, dict[str, object]]:
    """Fields of a line: `log.info("…", extra=fields(request_id=…))`. What is None is left out."""
    assert not set(named) & set(RESERVED), f"{sorted(set(named) & set(RESERVED))} are a line's own"
    return {"noria_fields": {name: value for name, value in named.items() if value is not None}}


def line_of(record: logging.LogRecord, process: str) -> Line:
    """What `record` says."""
    line = new_line(record.created, record.levelname.lower(), record.name, process, record.getMessage())
    said: dict[str, object] = getattr(record, "noria_fields", {})
    line |= {name: _plain(value) for name, value in redacted_fields(said).items()}
    if record.exc_info is not None and record.exc_info[1] is not None:
        told = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        line["exception"] = _clean(told, _LONGEST_EXCEPTION)
    return line


def new_line(time_s: float, level: str, logger: str, process: str, message: str) -> Line:
    """A line without fields yet; `time_s` is Unix time."""
    return {
        "time": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "process": process,
        "message": _clean(message),
    }


def fault_line(time_s: float, process: str, text: str, *, is_fault: bool) -> Line:
    """The line of what a process wrote without our log: `text`, or a traceback of several lines if `is_fault`."""
    level = "error" if is_fault else "warning"
    if not is_fault:
        return new_line(time_s, level, "stderr", process, text)
    line = new_line(time_s, level, "stderr", process, text.rstrip().rpartition("\n")[2])
    return line | {"exception": _clean(text.rstrip(), _LONGEST_EXCEPTION)}


def as_json(line: Mapping[str, object]) -> bytes:
    """One object on one line, without its end."""
    return _bounded(line, _encoded)


def _encoded(line: Mapping[str, object]) -> bytes:
    text = msgspec.json.encode(line).decode()  # which leaves what is above 0x1f as it is
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def as_text(line: Mapping[str, object], *, coloured: bool = False) -> bytes:
    """For people: one line, and one more for each of an exception, which begins with `INDENT`; without its end."""
    return _bounded(line, functools.partial(_told, coloured=coloured))


def _told(line: Mapping[str, object], *, coloured: bool) -> bytes:
    level = str(line["level"])
    head = f"{line['time']} {level.upper():<8} {_printable(line['process'])} {_printable(line['logger'])}: "
    rest = [f"{name}={_shown(value)}" for name, value in line.items() if name not in (*RESERVED, "event")]
    text = head + "  ".join([_printable(line["message"]), *([" ".join(rest)] if rest else [])])
    if "exception" in line:
        text += "".join(f"\n{INDENT}{_printable(part)}" for part in str(line["exception"]).split("\n"))
    if coloured and level in _COLOURS:
        text = f"\x1b[{_COLOURS[level]}m{text}\x1b[0m"
    return text.encode()


Render = Callable[[Mapping[str, object]], bytes]


def _bounded(line: Mapping[str, object], render: Render) -> bytes:
    """`line` as `render` has it, all its values cut as far as it takes."""
    longest, written = _LONGEST_TEXT, render(line)
    while len(written) > LONGEST_LINE_BYTES and longest > 1:
        longest //= 4
        line = {name: _shortened(value, longest) for name, value in line.items()}
        written = render(line)
    return written


def _shortened(value: object, longest: int) -> object:
    """Texts of some `longest` characters, and lists of so many."""
    match value:
        case str():
            return _cut(value, longest)
        case list():
            kept = [_shortened(each, longest) for each in value[:longest]]
            return kept if len(kept) == len(value) else [*kept, CUT]
        case _:
            return value


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _printable(text if _BARE.fullmatch(text) else msgspec.json.encode(text).decode())


def _printable(value: object) -> str:
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(value))


def _plain(value: object) -> object:
    """`value` as JSON has it: a number, a truth, or clean text; a list of them stays a list."""
    if not isinstance(value, list | tuple):
        return _simple(value)
    kept = [_simple(each) for each in value[:_LONGEST_LIST]]
    return kept if len(kept) == len(value) else [*kept, CUT]


def _simple(value: object) -> object:
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else _clean(str(value))
        case float():
            return round(value, 6) if math.isfinite(value) else str(value)
        case _:
            return _clean(str(value))


def _clean(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Without secrets, of bounded length, and encodable."""
    most = _LONGEST_READ if "\n" in text else min(2 * longest, _LONGEST_READ)  # of one line the end is not shown
    clean = redacted(text[:most])
    clean = _cut(clean if len(text) <= most else clean[:-_LONGEST_SECRET], longest)
    return _SURROGATES.sub(lambda found: ascii(found[0])[1:-1], clean)


def _cut(text: str, longest: int) -> str:
    """Some `longest` characters of `text`: the end of what has several lines is as telling as its beginning."""
    if len(text) <= longest:
        return text
    if "\n" not in text:
        return text[:longest] + CUT
    return text[: longest // 2] + f"\n{CUT}\n" + text[-(longest // 2) :]
