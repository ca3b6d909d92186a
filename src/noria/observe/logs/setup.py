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
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TextIO

from opentelemetry.trace import INVALID_SPAN, format_span_id, format_trace_id

from noria.observe.logs.log_record import Line, Render, as_json, as_text, fields, line_from_record, line_of
from noria.observe.logs.writer import NonBlockingWriter, SharedPipe
from noria.observe.request_scope import CURRENT_REQUEST, current_span

LogFormat = Literal["auto", "json", "text"]

_LEVELS = {level: logging.getLevelName(level).lower() for level in range(logging.DEBUG, logging.CRITICAL + 1, 10)}
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

    def __init__(
        self,
        process: str,
        put: Callable[[Line], None],
        flush: Callable[[], None] = lambda: None,
        gathering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`gathering` returns a context in which the lines of requests in an event loop are written together."""
        super().__init__()
        self._process, self._put, self._flush, self.gathering = process, put, flush, gathering

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit `record`, without logging's filters and lock, which take as long as the rest."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the line of `record`, with the ids of the current request, to `put`."""
        try:
            record.noria_fields = _context_fields() | getattr(record, "noria_fields", {})
            self._put(line_from_record(record, self._process))
        except Exception:  # as in every handler of the standard library: logging must not fail the work
            self.handleError(record)

    def put(self, level: int, logger: str, message: str, named: dict[str, object]) -> None:
        """Pass a line that has no record to `put`, with the ids of the current request."""
        try:
            self._put(line_of(time.time(), _LEVELS[level], logger, self._process, message, _context_fields() | named))
        except Exception:
            self.handleError(logging.makeLogRecord({"name": logger, "msg": message}))

    def flush(self) -> None:
        """Wait, in bounded time, until queued lines are written; `logging.shutdown` calls it."""
        self._flush()


def _context_fields() -> dict[str, object]:
    if (request_id := CURRENT_REQUEST.get()) is None:
        return {}
    if (current := current_span()) is INVALID_SPAN or not (span := current.get_span_context()).is_valid:
        return {"request_id": request_id}
    return {
        "request_id": request_id,
        "trace_id": format_trace_id(span.trace_id),
        "span_id": format_span_id(span.span_id),
    }


def log_fields(logger: logging.Logger, level: int, message: str, named: Mapping[str, object], *, event: str) -> None:
    """Log `message` with `event` and the fields `named` that are not None.

    As `logger.log` does with `extra=fields(…)`, but in a third of its time: without a record, unless somebody has added
    a handler or a filter that is to see it.
    """
    if not logger.isEnabledFor(level):
        return
    ancestor: logging.Logger | None = logger
    while ancestor is not None and not ancestor.filters:
        if ancestor.handlers or not ancestor.propagate:
            break
        ancestor = ancestor.parent
    if isinstance(ancestor, logging.RootLogger) and len(ancestor.handlers) == 1 and not ancestor.filters:
        (handler,) = ancestor.handlers
        if isinstance(handler, LineHandler):
            handler.put(level, logger.name, message, {"event": event, **named})
            return
    logger.log(level, message, extra=fields(event=event, **named))


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
        yield LineHandler(process, writer.put, writer.flush, writer.gathering)
    finally:
        writer.close()


@contextlib.contextmanager
def gathering_lines() -> Iterator[None]:
    """In this context, the log lines of requests in the running event loop are written together, some ms later."""
    with contextlib.ExitStack() as stack:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LineHandler):
                stack.enter_context(handler.gathering())
        yield


def stderr_handler(process: str, log_format: LogFormat, stream: TextIO) -> LineHandler:
    """Return a handler that writes to `stream`, for a process without a supervisor."""
    render, lock = render_for(log_format, stream, os.environ), threading.Lock()

    def put(line: Line) -> None:
        with lock:  # text streams are not thread-safe
            stream.write(f"{render(line).decode()}\n")
            stream.flush()

    return LineHandler(process, put)
