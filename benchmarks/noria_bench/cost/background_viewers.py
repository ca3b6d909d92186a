"""Who looks at a server while it works: a page /live that is open, and Prometheus' scrapes. Threads, as light as what they stand for."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

SCRAPE_EVERY_S = 15.0  # as deploy/prometheus.yml has it
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"  # Prometheus' own wish, shortened
_READ_BYTES = 65536  # bytes
_VIEW_EVENT = b"event: wheel"
_READY_TIMEOUT_S = 60.0


@dataclass
class ViewerStats:
    """What they were given."""

    num_views: int = 0  # of the wheel
    live_bytes: int = 0
    scrapes_s: list[float] = field(default_factory=list)  # how long each scrape took
    fault: str = ""  # why somebody saw nothing
    ready: threading.Event = field(default_factory=threading.Event)  # the page has shown a wheel, or it will show none


@contextlib.contextmanager
def background_viewers(port: int, *, live: bool, scrapes: bool) -> Iterator[ViewerStats]:
    """Look at the server on loopback `port` meanwhile; a page is open, and has shown a wheel or a fault, before the work begins."""
    stats, ended = ViewerStats(), threading.Event()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        page: socket.socket = connection.sock  # which the answer takes over
        threads = []
        if live:
            threads.append(threading.Thread(target=_read_live_view, args=(connection, stats, ended)))
        if scrapes:
            threads.append(threading.Thread(target=_scrape_loop, args=(port, stats, ended)))
        for thread in threads:
            thread.start()
        try:
            if live:
                stats.ready.wait(_READY_TIMEOUT_S)
            yield stats
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                page.shutdown(socket.SHUT_RDWR)  # who is waiting for its next word stops
            for thread in threads:
                thread.join()


def _read_live_view(connection: http.client.HTTPConnection, stats: ViewerStats, ended: threading.Event) -> None:
    """Read `GET /v1/live`, pictures too, as a browser does."""
    tail = b""
    try:
        connection.request("GET", "/v1/live", headers={"Accept": "text/event-stream"})
        answer = connection.getresponse()
        if answer.status != 200:
            stats.fault = f"GET /v1/live was answered {answer.status}"
            return
        while chunk := answer.read1(_READ_BYTES):
            stats.live_bytes += len(chunk)
            # An event's name may be cut in two by the reads.
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
        if ended.wait(SCRAPE_EVERY_S):
            return


def scrape(port: int) -> tuple[float, int]:
    """Ask for /metrics as Prometheus does; returns how long it took, seconds, and how many bytes came. Raises OSError or HTTPException where it failed."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        started = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept": _ACCEPT})
        answer = connection.getresponse()
        num_bytes = len(answer.read())
        if answer.status != 200:
            raise http.client.HTTPException(f"it was answered {answer.status}")
        return time.perf_counter() - started, num_bytes
