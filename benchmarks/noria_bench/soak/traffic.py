"""The ordinary clients of a soak, at a moderate rate. Some leave early, and some read slowly."""

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from noria_bench.load.closed_loop import HEADERS

_TIMEOUT_S = 120.0
_EXPECTED = (200, 202, 204, 404, 429, 503)
"""404: a job that another client has erased. 429 and 503: the queue is full, an engine restarts."""

Connection = http.client.HTTPConnection
Visit = Callable[[Connection, random.Random], int]
"""Sends a client's requests; returns the last status."""


def image(connection: Connection, chooser: random.Random) -> int:
    """Generate a small image."""
    return _send(connection, "POST", "/t2i", _body(chooser))[0]


def stream(connection: Connection, chooser: random.Random) -> int:
    """Generate one with previews."""
    body = {"prompt": "a blue star", "inference_steps": chooser.randint(2, 6), "stream": True, "partial_images": 2}
    return _send(connection, "POST", "/v1/images/generations", body)[0]


def cancel(connection: Connection, chooser: random.Random) -> int:
    """Leave before the image is there; also while it is queued or decoded."""
    connection.request("POST", "/t2i", json.dumps(_body(chooser)), HEADERS)
    time.sleep(chooser.uniform(0, 0.4))
    connection.close()
    return 200


def slow_reader(connection: Connection, chooser: random.Random) -> int:
    """Read an image in small pieces."""
    connection.request("POST", "/t2i", json.dumps(_body(chooser) | {"n": 4}), HEADERS)
    response = connection.getresponse()
    for _ in range(20):
        if not response.read(200):
            break
        time.sleep(0.1)
    connection.close()
    return response.status


def job(connection: Connection, chooser: random.Random) -> int:
    """Create a job, wait for it, read its image; some cancel or erase it."""
    status, content = _send(connection, "POST", "/v1/jobs", {"input": _body(chooser)})
    if status != 202:
        return status
    path = f"/v1/jobs/{json.loads(content)['id']}"
    if chooser.random() < 0.2:
        return _send(connection, "DELETE", path)[0]
    _send(connection, "GET", f"{path}/events")
    status, _ = _send(connection, "GET", f"{path}/images/0")
    return _send(connection, "DELETE", f"{path}?erase=true")[0] if chooser.random() < 0.5 else status


def pages(connection: Connection, chooser: random.Random) -> int:
    """Read what a browser and a monitoring system read."""
    path = chooser.choice(("/", "/live", "/docs", "/openapi.json", "/metrics", "/readyz", "/v1/models", "/v1/jobs"))
    return _send(connection, "GET", path)[0]


def viewer(connection: Connection, chooser: random.Random) -> int:
    """Watch the running batch for some seconds."""
    connection.request("GET", "/v1/live", headers=HEADERS)
    response, until = connection.getresponse(), time.monotonic() + chooser.uniform(1, 6)
    while time.monotonic() < until and response.read1(65_536):
        pass
    connection.close()
    return response.status


VISITS: Mapping[str, tuple[Visit, float]] = MappingProxyType(
    {
        "image": (image, 0.5),
        "stream": (stream, 1.5),
        "cancel": (cancel, 1.0),
        "slow reader": (slow_reader, 2.0),
        "job": (job, 1.0),
        "pages": (pages, 0.5),
        "viewer": (viewer, 2.0),
    }
)
"""For each kind of traffic, its client, and the seconds that it rests between its visits."""


class Visitor(threading.Thread):
    """Visits until `stopped`. `outcomes` counts statuses; `unexpected` has the first responses that are defects."""

    def __init__(self, port: int, name: str, visit: Visit, rest_s: float, stopped: threading.Event, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self._port, self._visit, self._rest_s, self._stopped = port, visit, rest_s, stopped
        self._random = random.Random(f"{name} {seed}")
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def run(self) -> None:
        """Visit until the end."""
        while not self._stopped.wait(self._random.uniform(0, 2 * self._rest_s)):
            with contextlib.closing(Connection("127.0.0.1", self._port, timeout=_TIMEOUT_S)) as connection:
                try:
                    status = self._visit(connection, self._random)
                except TimeoutError:
                    self._note("no answer")
                except (OSError, http.client.HTTPException):
                    self.outcomes["disconnected"] += 1  # a killed front end
                else:
                    self.outcomes[str(status)] += 1
                    if status not in _EXPECTED:
                        self._note(f"status {status}")

    def _note(self, what: str) -> None:
        self.outcomes["unexpected"] += 1
        self.unexpected.append(f"{self.name}: {what}")


def start_visitors(port: int, stopped: threading.Event, seed: int) -> Sequence[Visitor]:
    """Start one visitor of each kind."""
    visitors = [Visitor(port, name, visit, rest_s, stopped, seed) for name, (visit, rest_s) in VISITS.items()]
    for visitor in visitors:
        visitor.start()
    return visitors


def _body(chooser: random.Random) -> dict[str, Any]:
    return {
        "prompt": chooser.choice(("a red circle", "a green star above a blue square")),
        "seed": chooser.randrange(1000),
        "inference_steps": chooser.randint(2, 6),
        "scheduler": chooser.choice(("dpm++2m", "ddim", "euler-a", "heun")),
        "guidance_scale": chooser.choice((1.0, 3.0)),
    }


def _send(connection: Connection, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
    response = connection.getresponse()
    return response.status, response.read()
