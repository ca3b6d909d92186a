"""Sets up the logging of a process.

A child of the supervisor writes marked JSON lines into its pipe, which the supervisor merges into the server's log
(`noria.supervisor.log_collector`). A process without a supervisor (`noria generate`) writes to its stderr.

    log.info("tiny is ready", extra=fields(event="models_ready", device="cuda:0"))

Every line of a request has its `request_id`, and `trace_id` and `span_id` if it is traced: from the line's own fields,
else from `request_scope.CURRENT_REQUEST` and OpenTelemetry's current span, which follow tasks, not threads.
"""

import contextlib
import io
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TextIO

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

from noria.observe.logs.log_record import Line, Render, as_json, as_text, fields, line_from_record
from noria.observe.logs.writer import NonBlockingWriter, SharedPipe
from noria.observe.request_scope import CURRENT_REQUEST

__all__ = [
    "LineHandler",
    "child_log_environment",
    "fields",
    "logging_here",
    "logging_to",
    "new_mark",
    "render_for",
    "stderr_handler",
]

LogFormat = Literal["auto", "json", "text"]

_MARK_VARIABLE = "_NORIA_LOG_MARK"  # not a setting: settings are NORIA_…


def new_mark() -> bytes:
    """Return a new mark, which begins each log line in a child's pipe, so that no other output is taken for one.

    It is a record separator, as in RFC 7464, and random digits, which no prompt can contain.
    """
    return b"\x1e" + secrets.token_hex(8).encode() + b" "


def child_log_environment(mark: bytes) -> dict[str, str]:
    """Return the environment variables that make a child write marked lines, and other output unbuffered."""
    return {_MARK_VARIABLE: mark.decode(), "PYTHONUNBUFFERED": "1"}


class LineHandler(logging.Handler):
    """Makes a line of each record and passes it to `put`, which any thread may call. Filters of it have no effect."""

    def __init__(self, process: str, put: Callable[[Line], None], flush: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._process, self._put, self._flush = process, put, flush

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit `record`, without logging's filters and lock, which take as long as the rest."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the line of `record`, with the ids of the current request, to `put`."""
        try:
            _add_context(record)
            self._put(line_from_record(record, self._process))
        except Exception:  # as in every handler of the standard library: logging must not fail the work
            self.handleError(record)

    def flush(self) -> None:
        """Wait, in bounded time, until queued lines are written; `logging.shutdown` calls it."""
        self._flush()


def _add_context(record: logging.LogRecord) -> None:
    """Add the ids of the current request to the fields of `record`."""
    if (request_id := CURRENT_REQUEST.get()) is not None:
        ids, span = {"request_id": request_id}, get_current_span().get_span_context()
        if span.is_valid:
            ids |= {"trace_id": format_trace_id(span.trace_id), "span_id": format_span_id(span.span_id)}
        record.noria_fields = ids | getattr(record, "noria_fields", {})


def render_for(log_format: LogFormat, stream: TextIO, environment: Mapping[str, str]) -> Render:
    """Return the renderer for `stream`; `auto` is text on a terminal, coloured unless NO_COLOR is set, else JSON."""
    on_terminal = stream.isatty()
    if log_format == "json" or (log_format == "auto" and not on_terminal):
        return as_json
    coloured = on_terminal and not environment.get("NO_COLOR")  # no-color.org: set, and not empty
    return lambda line: as_text(line, coloured=coloured)


@contextlib.contextmanager
def logging_to(handler: LineHandler, level: str) -> Iterator[None]:
    """In this context, records and warnings at `level` or above go to `handler`."""
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
    """In this context, the process logs to its stderr under the name `process`.

    With marks if the supervisor started it.
    """
    # Nothing of the lines; collecting them takes a fifth of a line's time (logging's HOWTO, "Optimization").
    for unused in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks", "_srcfile"):
        setattr(logging, unused, None)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    mark = os.environ.get(_MARK_VARIABLE)
    open_handler = (
        _to_supervisor(process, mark.encode())
        if mark
        else contextlib.nullcontext(stderr_handler(process, log_format, sys.stderr))
    )
    with open_handler as handler, logging_to(handler, level):
        yield


@contextlib.contextmanager
def _to_supervisor(process: str, mark: bytes) -> Iterator[LineHandler]:
    """Yield a handler that never blocks; at the end queued lines are written, for two seconds at most."""
    writer = NonBlockingWriter(lambda line: mark + as_json(line), SharedPipe(sys.stderr.fileno()), process)
    writer.start()
    try:
        yield LineHandler(process, writer.put, writer.flush)
    finally:
        writer.close()


def stderr_handler(process: str, log_format: LogFormat, stream: TextIO) -> LineHandler:
    """Return a handler that writes to `stream`, for a process without a supervisor."""
    render, lock = render_for(log_format, stream, os.environ), threading.Lock()

    def put(line: Line) -> None:
        with lock:  # text streams are not thread-safe
            stream.write(f"{render(line).decode()}\n")
            stream.flush()

    return LineHandler(process, put)
