"""Background clients of a loaded server: an open page /live, and Prometheus' scrapes. They run in threads."""

import contextlib
import functools
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from noria_bench.running import in_background

# As in deploy/prometheus.
SCRAPE_INTERVAL_S = 15.0
# Prometheus' header, shortened.
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
_READ_BYTES = 65536
_VIEW_EVENT = b"event: engine_view"
_READY_TIMEOUT_S = 60.0


@dataclass
class ViewerStats:
    """The counts of what the clients received."""

    num_views: int = 0  # engine views on the page
    scrapes_s: list[float] = field(default_factory=list)  # the duration of each scrape
    fault: str = ""  # why a client received nothing
    ready: threading.Event = field(default_factory=threading.Event)  # the page has a view, or has failed


@contextlib.contextmanager
def background_viewers(port: int, *, live: bool, scrapes: bool) -> Iterator[ViewerStats]:
    """Run the clients of the server on loopback `port` meanwhile.

    The page has received a view, or failed, before the block starts.
    """
    stats = ViewerStats()
    with contextlib.ExitStack() as stack:
        if scrapes:
            stack.enter_context(in_background(functools.partial(_scrape_loop, port, stats)))
        if live:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            stack.enter_context(contextlib.closing(connection))
            connection.connect()
            page: socket.socket = connection.sock  # the response takes it over
            ended = stack.enter_context(in_background(functools.partial(_read_live_view, connection, stats)))
            stack.callback(_end_page, page, ended)
            stats.ready.wait(_READY_TIMEOUT_S)
        yield stats


def _end_page(page: socket.socket, ended: threading.Event) -> None:
    """End a read that waits."""
    ended.set()
    with contextlib.suppress(OSError):
        page.shutdown(socket.SHUT_RDWR)


def _read_live_view(connection: http.client.HTTPConnection, stats: ViewerStats, ended: threading.Event) -> None:
    """Read `GET /v1/live` with thumbnails, as a browser does."""
    tail = b""
    try:
        connection.request("GET", "/v1/live", headers={"Accept": "text/event-stream"})
        answer = connection.getresponse()
        if answer.status != 200:
            stats.fault = f"GET /v1/live returned {answer.status}"
            return
        while chunk := answer.read1(_READ_BYTES):
            # A read may end within an event's name.
            stats.num_views += (tail + chunk).count(_VIEW_EVENT)
            tail = chunk[1 - len(_VIEW_EVENT) :]
            if stats.num_views:
                stats.ready.set()
        if not ended.is_set():
            stats.fault = "GET /v1/live ended"
    except (OSError, http.client.HTTPException) as error:
        if not ended.is_set():
            stats.fault = f"GET /v1/live broke off: {error}"
    finally:
        stats.ready.set()


def _scrape_loop(port: int, stats: ViewerStats, ended: threading.Event) -> None:
    while True:
        try:
            stats.scrapes_s.append(scrape(port)[0])
        except (OSError, http.client.HTTPException) as error:
            stats.fault = f"GET /metrics failed: {error}"
        if ended.wait(SCRAPE_INTERVAL_S):
            return


def scrape(port: int) -> tuple[float, int]:
    """Request /metrics as Prometheus does; returns its duration in seconds and its bytes.

    Raises OSError or HTTPException.
    """
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        started = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept": _ACCEPT})
        answer = connection.getresponse()
        num_bytes = len(answer.read())
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        return time.perf_counter() - started, num_bytes
