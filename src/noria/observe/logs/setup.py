"""How a process logs: one way for all of them.

A child of the supervisor writes marked JSON lines into the pipe of which the supervisor makes the server's log (`noria.supervisor.log_collector`); whoever is
alone (`noria generate`, a process started by hand) writes its own.

    log.info("tiny is ready", extra=fields(event="models_ready", device="cuda:0"))

Every line of a request has its `request_id`, and `trace_id` and `span_id` if it is traced: from the line's own fields, else from
`observe.context.CURRENT`, which follows tasks, not threads.
"""

import contextlib
import io
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TextIO

from noria.observe.logs.log_record import Line, Render, as_json, as_text, fields, line_from_record
from noria.observe.logs.writer import NonBlockingWriter, SharedPipe
from noria.observe.request_scope import CURRENT_REQUEST

__all__ = ["LineHandler", "child_log_environment", "fields", "logging_here", "logging_to", "new_mark", "render_for"]

LogFormat = Literal["auto", "json", "text"]

_MARK_VARIABLE = "_NORIA_LOG_MARK"  # not a setting: settings are NORIA_…


def new_mark() -> bytes:
    """What lines of ours begin with in the pipe from a child, so that nothing else that it prints is taken for one.

    RFC 7464 begins a JSON text of a sequence with a record separator; the rest is chance, which no prompt can know.
    """
    return b"\x1e" + secrets.token_hex(8).encode() + b" "


def child_log_environment(mark: bytes) -> dict[str, str]:
    """What children have to find in their environment to write such lines, and to write at once whatever else they print."""
    return {_MARK_VARIABLE: mark.decode(), "PYTHONUNBUFFERED": "1"}


class LineHandler(logging.Handler):
    """Makes a line of each record and gives it to `put`."""

    def __init__(self, process: str, put: Callable[[Line], None], flush: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._process, self._put, self._flush = process, put, flush
        self.addFilter(_add_context)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on what it says."""
        try:
            self._put(line_from_record(record, self._process))
        except Exception:  # as every handler of the standard library: a line is not worth the work that it tells of
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what is on its way, in bounded time; `logging.shutdown` does it for who ends without unwinding."""
        self._flush()


def _add_context(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass: puts whose work is being done before the record's own fields."""
    if (current := CURRENT_REQUEST.get()) is not None:
        ids = {"request_id": current.request_id, "trace_id": current.trace_id, "span_id": current.span_id}
        own_fields: dict[str, object] = getattr(record, "noria_fields", {})
        record.noria_fields = {name: text for name, text in ids.items() if text} | own_fields
    return True


def render_for(log_format: LogFormat, stream: TextIO, environment: Mapping[str, str]) -> Render:
    """How lines are written to `stream`: `auto` is text on a terminal, with colours unless NO_COLOR is set; JSON elsewhere."""
    on_terminal = stream.isatty()
    if log_format == "json" or (log_format == "auto" and not on_terminal):
        return as_json
    coloured = on_terminal and not environment.get("NO_COLOR")  # no-color.org: set, and not empty
    return lambda line: as_text(line, coloured=coloured)


@contextlib.contextmanager
def logging_to(handler: LineHandler, level: str) -> Iterator[None]:
    """Meanwhile everything that is logged or warned of at `level` or above goes to `handler`."""
    root = logging.getLogger()
    previous_level = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(previous_level)


@contextlib.contextmanager
def logging_here(process: str, level: str, log_format: LogFormat = "auto") -> Iterator[None]:
    """Meanwhile this process, called `process`, logs to its stderr: marked for the supervisor if that has started it."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    mark = os.environ.get(_MARK_VARIABLE)
    open_handler = _to_supervisor(process, mark.encode()) if mark else _to_stderr(process, log_format)
    with open_handler as handler, logging_to(handler, level):
        yield


@contextlib.contextmanager
def _to_supervisor(process: str, mark: bytes) -> Iterator[LineHandler]:
    """A handler that nobody waits for; at the end what it holds is written, for two seconds at most."""
    writer = NonBlockingWriter(lambda line: mark + as_json(line), SharedPipe(sys.stderr.fileno()), process)
    writer.start()
    try:
        yield LineHandler(process, writer.put, writer.flush)
    finally:
        writer.close()


@contextlib.contextmanager
def _to_stderr(process: str, log_format: LogFormat) -> Iterator[LineHandler]:
    """A handler of who is alone, and has nobody to hold up."""
    render = render_for(log_format, sys.stderr, os.environ)

    def put(line: Line) -> None:
        sys.stderr.write(f"{render(line).decode()}\n")  # one write: two threads' lines do not mix
        sys.stderr.flush()

    yield LineHandler(process, put)
