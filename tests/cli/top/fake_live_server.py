"""Views of an engine, and a fake server on loopback that streams them."""

import contextlib
import http.server
import json
import socket
import threading

import msgspec

from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.live_views import DepartureView, IterationView, RatesView, ShareView, SlotView, WaitingView
from noria.protocol.messages import EngineView

SERVER_TIME = 1_000_000.0  # the server's clock
SHARES = (
    ShareView("alice", 0.62, 6, 2, 9, 3),
    ShareView("a-name-of-a-key-that-is-long", 0.3, 2, 0, 0, 0),
    ShareView("", 0.08, 0, 0, 2, 0, num_clients=2),
)


def slot_view(slot, **changes):
    view = SlotView(
        slot,
        f"req-{slot}",
        0,
        "noria-shapes",
        ImageSettingsView(64, 48, "dpm++2m-karras", 7.5, 20),
        5,
        20,
        "normal",
        SERVER_TIME - 1,
        None,
        SERVER_TIME + 3,
    )
    return msgspec.structs.replace(view, **changes)


def engine_view(num_slots=8, slots=(), num_waiting=0, number=100, **changes):
    """A view whose iterations are the last 100 up to `number`."""
    waiting = tuple(
        WaitingView(
            f"wait-{k}",
            1,
            "noria-shapes",
            ImageSettingsView(64, 64, "euler", 3.0, 25),
            "normal",
            SERVER_TIME,
            SERVER_TIME + k,
            None,
        )
        for k in range(num_waiting)
    )
    iterations = tuple(
        IterationView(
            k, SERVER_TIME - 100 + k, 0.03, 0.01 if k % 7 == 0 else 0.0, 0.02 if k % 5 == 0 else 0.0, 0, k % 9, 0
        )
        for k in range(number - 99, number + 1)
    )
    view = EngineView(
        incarnation="incarnation-1",
        captured_at=SERVER_TIME,
        last_iteration=number,
        num_slots=num_slots,
        slots=tuple(slots),
        waiting=waiting,
        num_waiting=num_waiting,
        backlog_s=4.5,
        iterations=iterations,
        departures=(DepartureView(number, num_slots - 1, "gone", 0, "ok"),),
        rates=RatesView(10.0, 2.5, 4.21, 88.4, 1.92, 3.1, 4.04, 7.3, 0.46, 0.99),
    )
    return msgspec.structs.replace(view, **changes)


def engines_event(*names, state="ready", incarnation="incarnation-1"):
    engines = [{"name": name, "state": state, "device": "cpu", "incarnation": incarnation} for name in names]
    return event("engines", {"engines": engines, "server": {"version": "9.9", "models": ["noria-shapes"]}})


def view_event(name, view):
    return event("engine_view", msgspec.to_builtins(view) | {"engine": name})


def event(name, data):
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


@contextlib.contextmanager
def unreachable_url():
    """A URL with a port that is bound but not listening, so that no other process can take it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


class FakeLiveServer(http.server.ThreadingHTTPServer):
    """Answers each connection with the next of `responses` (the last one repeats): parts of a stream, or a status and a
    body.

    After the last part it holds the connection until `released` is set; a part None closes it at once.
    """

    daemon_threads = True

    def __init__(self, responses, port=0):
        super().__init__(("127.0.0.1", port), LiveRequestHandler)
        self.responses, self.requests, self.released = list(responses), [], threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):  # a client that disconnected
        pass


class LiveRequestHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        response = self.server.responses.pop(0) if len(self.server.responses) > 1 else self.server.responses[0]
        if isinstance(response, tuple):
            status, body = response
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for part in response:
            if part is None:  # close the connection here
                return
            self.wfile.write(part)
        self.server.released.wait()

    def log_message(self, *_):
        pass
