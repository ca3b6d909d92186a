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
_AT_ONCE = 65536  # bytes
_VIEW = b"event: wheel"
_SHOWN_WITHIN_S = 60.0


@dataclass
class Seen:
    """What they were given."""

    views: int = 0  # of the wheel
    live_bytes: int = 0
    scrapes_s: list[float] = field(default_factory=list)  # how long each scrape took
    fault: str = ""  # why somebody saw nothing
    shown: threading.Event = field(default_factory=threading.Event)  # the page has shown a wheel, or it will show none


@contextlib.contextmanager
def onlookers(port: int, *, live: bool, scrapes: bool) -> Iterator[Seen]:
    """Look at the server on loopback `port` meanwhile; a page is open, and has shown a wheel or a fault, before the work begins."""
    seen, ended = Seen(), threading.Event()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        page: socket.socket = connection.sock  # which the answer takes over
        threads = []
        if live:
            threads.append(threading.Thread(target=_watch, args=(connection, seen, ended)))
        if scrapes:
            threads.append(threading.Thread(target=_scrape, args=(port, seen, ended)))
        for thread in threads:
            thread.start()
        try:
            if live:
                seen.shown.wait(_SHOWN_WITHIN_S)
            yield seen
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                page.shutdown(socket.SHUT_RDWR)  # who is waiting for its next word stops
            for thread in threads:
                thread.join()


def _watch(connection: http.client.HTTPConnection, seen: Seen, ended: threading.Event) -> None:
    """Read `GET /v1/live`, pictures too, as a browser does."""
    last = b""
    try:
        connection.request("GET", "/v1/live", headers={"Accept": "text/event-stream"})
        answer = connection.getresponse()
        if answer.status != 200:
            seen.fault = f"GET /v1/live was answered {answer.status}"
            return
        while part := answer.read1(_AT_ONCE):
            seen.live_bytes += len(part)
            # An event's name may be cut in two by the reads.
            seen.views += (last + part).count(_VIEW)
            last = part[1 - len(_VIEW) :]
            if seen.views:
                seen.shown.set()
        if not ended.is_set():
            seen.fault = "GET /v1/live ended"
    except (OSError, http.client.HTTPException) as error:
        if not ended.is_set():
            seen.fault = f"GET /v1/live broke off: {error}"
    finally:
        seen.shown.set()


def _scrape(port: int, seen: Seen, ended: threading.Event) -> None:
    while True:
        try:
            seen.scrapes_s.append(scrape(port)[0])
        except (OSError, http.client.HTTPException) as error:
            seen.fault = f"GET /metrics failed: {error}"
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
