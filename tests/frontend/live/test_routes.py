"""GET /v1/live over a real socket, with a fake engine."""

import contextlib
import ctypes
import json
import pathlib
import socket
import struct
import threading

import httpx
import msgspec
import pytest

from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import key_digest
from noria.frontend.live import feed
from noria.frontend.live import routes as live
from noria.frontend.live.routes import resolve_live_setting
from noria.frontend.live.sprite_sheet import make_sprite_sheet
from noria.frontend.live.subscribers import MAX_SUBSCRIBERS, MAX_SUBSCRIBERS_PER_CLIENT, LiveSubscribers
from noria.frontend.server import connection
from noria.observe.logs.setup import LineHandler, logging_to
from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.live_views import (
    DepartureView,
    IterationView,
    RatesView,
    ShareView,
    SlotView,
    ThumbnailView,
    WaitingView,
)
from noria.protocol.messages import EngineView
from waiting import wait_until, wait_until_ready

_SO_ATTACH_FILTER = 26  # socket(7); the module `socket` has no name for it

RATES = RatesView(60.0, 1.0, 2.0, 3.0, 0.5, 0.9, 0.99, 4.0, 0.5, 0.75)


def slot_view(number):
    return SlotView(
        number,
        f"r{number}",
        0,
        "tiny",
        ImageSettingsView(64, 48, "ddim", 6.5, 12),
        3,
        12,
        "normal",
        1000.0,
        None,
        1002.0,
    )


class ViewMaker:
    """Makes the views of a fake engine: for each request one more iteration than before."""

    def __init__(self, colours=((250, 0, 0), (0, 0, 250)), num_iterations=None):
        """`num_iterations`: after so many, only requests for a first view are answered."""
        self.colours, self.num_left = colours, num_iterations
        self.last_iterations = {}  # by incarnation

    def __call__(self, request, incarnation, *, late=False):
        if self.num_left == 0 and request.last_iteration is not None and not late:
            return None
        if self.num_left:
            self.num_left -= 1
        number = self.last_iterations[incarnation] = self.last_iterations.get(incarnation, 0) + 1
        first = (request.last_iteration or 0) + 1
        iterations = tuple(IterationView(n, 1000.0, 0.1, 0.0, 0.0, 0, 2, 0) for n in range(first, number + 1))
        departures = (DepartureView(number, 0, f"departed-{number}", 0, "ok"),)
        thumbnails, pixels = (), None
        if request.with_thumbnails:
            thumbnails = tuple(ThumbnailView(n, f"r{n}", 0, 8, 6, 144 * n) for n in range(len(self.colours)))
            pixels = b"".join(bytes(colour) * 48 for colour in self.colours)
        slots = tuple(slot_view(n) for n in range(len(self.colours)))
        view = EngineView(incarnation, 1001.0, number, 4, slots, (), 0, 1.5, iterations, departures, RATES, thumbnails)
        return view, pixels


class Stream:
    """The events that one subscriber receives; comments are skipped."""

    def __init__(self, response):
        self.response, self._lines = response, response.iter_lines()

    def next(self, name=None):
        """The next event as (name, data); with `name`, the next of that name."""
        while True:
            lines = []
            while line := next(self._lines):
                lines.append(line)
            if lines == [": still here"]:
                continue
            fields = dict(line.split(": ", 1) for line in lines)
            if name in (None, fields["event"]):
                return fields["event"], json.loads(fields["data"])

    def rest(self):
        """The lines until the end."""
        return list(self._lines)

    def next_view(self):
        return self.next("engine_view")[1]


def client_at(address=None):
    """A client that connects from `address`, one of the many of loopback."""
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address, verify=False), verify=False, timeout=60)


@contextlib.contextmanager
def subscribed(url, query="", address=None, **options):
    with client_at(address) as client, client.stream("GET", f"{url}/v1/live{query}", **options) as response:
        assert response.status_code == 200, response.read()
        stream = Stream(response)  # kept alive: the response is closed with its line iterator
        yield stream


def rejected_subscription(url, address=None, **options):
    """Subscribe once more; returns the error and Retry-After in seconds."""
    with client_at(address) as client, client.stream("GET", f"{url}/v1/live", **options) as response:
        assert response.status_code == 429  # else the stream has no end
        return json.loads(response.read())["error"], int(response.headers["retry-after"])


def vanish(client):
    """Make the kernel drop all packets to `client`, as if its cable were pulled."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF's RET 0
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def use_all_streams(stack, url, **options):
    """Open as many streams as one client may have."""
    streams = [stack.enter_context(subscribed(url, **options)) for _ in range(MAX_SUBSCRIBERS_PER_CLIENT)]
    assert {stream.next()[0] for stream in streams} == {"engines"}
    return streams


@pytest.fixture
def start_server(serve, new_engine):
    """Start a front end with an engine of its own: `start_server(live="full")` returns (url, engine, server)."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            engine = new_engine()
            url, server = stack.enter_context(serve(Config(frontend=FrontendConfig(**options)), engine))
            wait_until_ready(url)
            return url, engine, server

        yield start


def test_engines_come_first_and_then_every_iteration_once(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with subscribed(url) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        name, data = stream.next()
        assert name == "engines"
        (engine_state,) = data["engines"]
        assert (engine_state["name"], engine_state["state"], engine_state["device"]) == ("engine-0", "ready", "cpu")
        assert data["server"]["models"] == ["tiny"]
        assert engine_state["kind"] == "diffusion"
        views = [stream.next_view() for _ in range(5)]
    assert {view["incarnation"] for view in views} == {engine_state["incarnation"]}
    assert {view["engine"] for view in views} == {"engine-0"}
    numbers = [iteration["number"] for view in views for iteration in view["iterations"]]
    assert numbers == sorted(set(numbers))
    assert set(msgspec.structs.asdict(slot_view(0))) == set(views[0]["slots"][0])
    assert set(EngineView.__struct_fields__) | {"engine", "sprite_sheet"} == set(views[-1])
    assert views[0]["rates"]["p95_s"] == 0.9


def test_thumbnails_come_in_one_sprite_sheet(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with subscribed(url) as stream:
        view = stream.next_view()
    sprite_sheet = view["sprite_sheet"]
    assert (sprite_sheet["format"], sprite_sheet["width"], sprite_sheet["height"]) == ("jpeg", 16, 8)
    first, second = view["thumbnails"]
    assert (first["slot"], first["x"], first["y"], first["width_px"]) == (0, 0, 0, 8)
    assert (second["slot"], second["x"], second["y"], second["width_px"]) == (1, 8, 0, 8)
    assert "offset" not in view["thumbnails"][0]


def test_recorded_stream_has_the_declared_fields():
    """tests/data/live-stream.txt, which other tests read: a few seconds of a real stream."""
    blocks = (pathlib.Path(__file__).parents[2] / "data" / "live-stream.txt").read_text(encoding="utf-8").split("\n\n")
    events = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks if block]
    assert events[0]["event"] == "engines"
    views = [json.loads(event["data"]) for event in events if event["event"] == "engine_view"]
    assert len(views) > 10
    required = {*EngineView.__struct_fields__, "engine"}
    for view in views:
        assert required <= set(view) <= required | {"sprite_sheet"}
        for name, kind in (
            ("slots", SlotView),
            ("waiting", WaitingView),
            ("iterations", IterationView),
            ("departures", DepartureView),
            ("shares", ShareView),
        ):
            msgspec.convert(view[name], list[kind])
        msgspec.convert(view["rates"], RatesView)
    assert any(
        len({(image["settings"]["width"], image["settings"]["height"]) for image in view["slots"]}) > 1
        for view in views
    )
    assert any(view["waiting"] for view in views)
    assert any(view["departures"] for view in views)


@pytest.mark.parametrize(("options", "query"), [({}, "?thumbnails=false"), ({"live": "no-previews"}, "")])
def test_without_thumbnails_none_are_requested_from_the_engine(start_server, options, query):
    url, engine, _ = start_server(**options)
    engine.make_view = ViewMaker()
    with subscribed(url, query) as stream:
        for _ in range(3):
            view = stream.next_view()
            assert (view["thumbnails"], "sprite_sheet" in view) == ([], False)
    assert {request.with_thumbnails for request in engine.view_requests} == {False}


def test_subscriber_without_thumbnails_gets_none_beside_one_with_thumbnails(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with subscribed(url) as with_thumbnails, subscribed(url, "?thumbnails=false") as plain:
        assert "sprite_sheet" in with_thumbnails.next_view()
        for _ in range(3):
            assert "sprite_sheet" not in plain.next_view()


def test_without_subscribers_no_view_is_requested(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker(num_iterations=3)
    assert engine.view_requests == []
    with subscribed(url) as stream:
        stream.next_view()
        wait_until(lambda: len(engine.view_requests) == 4)  # the last one is not answered
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        wait_until(lambda: "noria_live_subscribers 0.0" in client.get("/metrics").text)
    engine.make_view = ViewMaker()
    num_asked = len(engine.view_requests)
    assert httpx.post(f"{url}/t2i", json={"prompt": "p"}, verify=False, timeout=60).status_code == 200
    assert len(engine.view_requests) == num_asked
    with subscribed(url) as stream:
        stream.next_view()
    assert engine.view_requests[num_asked].last_iteration is None  # views before are forgotten


def test_later_subscriber_gets_the_earlier_iterations(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker(num_iterations=5)
    with subscribed(url) as early:
        while early.next_view()["last_iteration"] < 5:
            pass
        with subscribed(url) as late:
            view = late.next_view()
    assert [iteration["number"] for iteration in view["iterations"]] == [1, 2, 3, 4, 5]
    assert view["departures"] == []
    assert len(view["slots"]) == 2


def test_engine_restart_is_reported_and_the_new_incarnation_starts_from_its_first_iteration(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with subscribed(url) as stream:
        first = stream.next_view()
        num_asked = len(engine.view_requests)
        engine.set_state("dead")
        states = []
        while "unknown" not in states:
            states.append(stream.next("engines")[1]["engines"][0]["state"])
        engine.set_state("ready")
        while states[-1] != "ready":
            states.append(stream.next("engines")[1]["engines"][0]["state"])
        while (view := stream.next_view())["incarnation"] == first["incarnation"]:
            pass
    assert view["iterations"][0]["number"] == 1
    assert any(request.last_iteration is None for request in engine.view_requests[num_asked:])


def test_subscriber_during_an_engine_outage_gets_no_old_view(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with subscribed(url) as early:
        first = early.next_view()
        engine.set_state("dead")
        while early.next("engines")[1]["engines"][0]["state"] != "unknown":
            pass
        with subscribed(url) as late:
            assert late.next()[1]["engines"][0]["state"] == "unknown"
            engine.set_state("ready")
            assert late.next_view()["incarnation"] != first["incarnation"]


def test_view_is_dropped_if_its_engine_ends_while_thumbnails_are_encoded(start_server, monkeypatch):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker(num_iterations=2)
    made, ended = threading.Semaphore(0), threading.Semaphore(1)  # the first view's are made at once

    def slow_sprite_sheet(*args):
        made.release()
        ended.acquire(timeout=60)
        return make_sprite_sheet(*args)

    monkeypatch.setattr(feed, "make_sprite_sheet", slow_sprite_sheet)
    with subscribed(url) as stream:
        first = stream.next_view()
        for _ in range(2):
            assert made.acquire(timeout=60)
        engine.set_state("dead")
        while stream.next("engines")[1]["engines"][0]["state"] != "unknown":
            pass
        engine.make_view = ViewMaker()
        ended.release(100)
        engine.set_state("ready")
        assert stream.next_view()["incarnation"] != first["incarnation"]


def test_late_answer_to_earlier_subscribers_loses_no_iterations_for_new_ones(start_server):
    url, engine, _ = start_server()
    complete, num_late = ViewMaker(num_iterations=5), 0

    def make_view(request, incarnation):
        """Return a view as an engine whose answer to earlier subscribers, with the last iteration only, is late."""
        nonlocal num_late
        if request.last_iteration is None and complete.num_left == 0 and num_late == 0:
            num_late += 1
            return complete(msgspec.structs.replace(request, last_iteration=5), incarnation, late=True)
        return complete(request, incarnation)

    engine.make_view = make_view
    with subscribed(url) as early:
        while early.next_view()["last_iteration"] < 5:
            pass
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        wait_until(lambda: "noria_live_subscribers 0.0" in client.get("/metrics").text)
    with subscribed(url) as stream:
        view = stream.next_view()
    assert num_late == 1
    assert [iteration["number"] for iteration in view["iterations"]] == list(range(1, view["last_iteration"] + 1))


def test_invalid_view_is_dropped_and_logged(start_server):
    url, engine, _ = start_server()
    make_valid_view = ViewMaker()

    def make_view(request, incarnation):
        view, pixels = make_valid_view(request, incarnation)
        return view, pixels[:10] if view.last_iteration == 2 else pixels

    engine.make_view = make_view
    lines = []
    with logging_to(LineHandler("frontend-0", lines.append), "error"), subscribed(url) as stream:
        numbers = [stream.next_view()["last_iteration"] for _ in range(3)]
    assert numbers == [1, 3, 4]
    (line,) = lines
    assert line["message"] == "engine-0: dropped an invalid view"
    assert "request_id" not in line  # it belongs to no request


@pytest.mark.parametrize(
    ("query", "field", "says"),
    [
        ("?thumbnails=no", "thumbnails", "allowed are true, false"),
        ("?thumbnail=false", "thumbnail", "Did you mean 'thumbnails'?"),
    ],
)
def test_invalid_query_parameter_is_rejected(client, query, field, says):
    response = client.get(f"/v1/live{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert says in response.json()["error"]["message"]


def test_disabled_stream_names_its_setting(start_server):
    url, _, _ = start_server(live="off")
    response = httpx.get(f"{url}/v1/live", verify=False, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert "frontend.live" in response.json()["error"]["message"]


def test_with_api_keys_it_needs_a_key_and_sends_no_thumbnails(start_server, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{key_digest(b"secret")}"\n')
    url, engine, _ = start_server(api_keys_file=str(keys))
    engine.make_view = ViewMaker()
    assert httpx.get(f"{url}/v1/live", verify=False, timeout=60).status_code == 401
    with subscribed(url, headers={"X-Api-Key": "secret"}) as stream:
        assert stream.next_view()["thumbnails"] == []
    assert {request.with_thumbnails for request in engine.view_requests} == {False}


def test_auto_allows_thumbnails_only_without_api_keys():
    assert resolve_live_setting(FrontendConfig()) == "full"
    assert resolve_live_setting(FrontendConfig(api_keys_file="keys.toml")) == "no-previews"
    assert resolve_live_setting(FrontendConfig(api_keys_file="keys.toml", live="full")) == "full"


def test_head_request_does_not_subscribe(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker()
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        response = client.head("/v1/live")
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "noria_live_subscribers 0.0" in client.get("/metrics").text


def test_number_of_subscribers_is_limited(start_server):
    url, _, _ = start_server()
    with contextlib.ExitStack() as stack:
        for number in range(MAX_SUBSCRIBERS // MAX_SUBSCRIBERS_PER_CLIENT):
            use_all_streams(stack, url, address=f"127.0.0.{number + 2}")
        error, retry_after_s = rejected_subscription(url)
        assert (error["code"], error["retryable"]) == ("rate_limited", True)
        assert error["message"].startswith(f"{MAX_SUBSCRIBERS} streams of GET /v1/live are under way already")
        assert retry_after_s > 0


def test_one_client_cannot_use_all_streams(start_server):
    url, _, _ = start_server()
    with contextlib.ExitStack() as stack:
        use_all_streams(stack, url, address="127.0.0.2")
        error, retry_after_s = rejected_subscription(url, address="127.0.0.2")
        assert error["code"] == "rate_limited"
        assert (
            f"the address 127.0.0.2 has {MAX_SUBSCRIBERS_PER_CLIENT} streams of GET /v1/live already"
            in error["message"]
        )
        assert retry_after_s > 0
        error, _ = rejected_subscription(url, address="127.0.0.2", headers={"X-Forwarded-For": "192.0.2.1"})
        assert "the address 127.0.0.2 has" in error["message"]  # it is no trusted proxy
        with subscribed(url) as stream:
            assert stream.next()[0] == "engines"


def test_with_api_keys_each_key_is_a_client_from_any_address(start_server, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[key]]\nname = "{name}"\nsha256 = "{key_digest(name.encode())}"\n' for name in "ab"))
    url, _, _ = start_server(api_keys_file=str(keys))
    with contextlib.ExitStack() as stack:
        use_all_streams(stack, url, headers={"X-Api-Key": "a"})
        error, _ = rejected_subscription(url, address="127.0.0.2", headers={"X-Api-Key": "a"})
        assert "the key 'a' has" in error["message"]


@pytest.mark.parametrize("leaves", ["by a close", "by a reset", "with another request waiting", "without a word"])
def test_disconnected_client_frees_its_stream(start_server, monkeypatch, leaves):
    monkeypatch.setattr(live, "KEEP_ALIVE_INTERVAL_S", 0.2)
    monkeypatch.setattr(connection, "TCP_USER_TIMEOUT_S", 0.5)
    url, _, _ = start_server()
    host = httpx.URL(url)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_SUBSCRIBERS_PER_CLIENT - 1):
            stack.enter_context(subscribed(url))
        last = stack.enter_context(socket.create_connection((host.host, host.port)))
        last.sendall(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert last.recv(4096).startswith(b"HTTP/1.1 200")
        rejected_subscription(url)
        match leaves:
            case "by a close":
                last.close()
            case "by a reset":
                last.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                last.close()
            case "with another request waiting":  # the server reads neither it nor the close behind it
                last.sendall(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                last.close()
            case "without a word":
                vanish(last)
        wait_until(lambda: httpx.head(f"{url}/v1/live", verify=False, timeout=60).status_code == 200)


def test_streams_end_when_the_server_stops(start_server):
    url, engine, server = start_server()
    engine.make_view = ViewMaker(num_iterations=1)
    with subscribed(url) as stream:
        stream.next_view()
        server.should_exit = True
        assert stream.rest() == []  # a broken connection would raise


def test_stalled_client_does_not_delay_shutdown(serve, new_engine, caplog):
    engine = new_engine()
    config = Config(frontend=FrontendConfig(drain_s=280))
    engine.make_view = ViewMaker(colours=[(n, 2 * n, 3 * n) for n in range(64)])
    with serve(config, engine) as (url, server), socket.socket() as silent:
        wait_until_ready(url)
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        address = httpx.URL(url)
        silent.connect((address.host, address.port))
        silent.sendall(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connections = server.server_state.connections
        wait_until(lambda: any(each.flow is not None and each.flow.write_paused for each in list(connections)))
        server.should_exit = True
        wait_until(lambda: not connections)  # long before drain_s is over
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_stalled_client_loses_views_and_delays_no_other(start_server):
    url, engine, _ = start_server()
    engine.make_view = ViewMaker(colours=[(n, 2 * n, 3 * n) for n in range(64)])
    stalled, done = threading.Event(), threading.Event()

    def stall():
        with subscribed(url):
            stalled.set()
            done.wait(120)

    thread = threading.Thread(target=stall)
    thread.start()
    assert stalled.wait(60)
    try:
        with subscribed(url) as stream:
            numbers = [stream.next_view()["last_iteration"] for _ in range(100)]
    finally:
        done.set()
        thread.join()
    assert len(set(numbers)) >= 99  # the first may repeat the newest view of the stalled subscriber


def test_subscriber_keeps_the_newest_views_of_each_engine_and_the_newest_state():
    subscriber = LiveSubscribers().add("the address 192.0.2.1", None, wants_thumbnails=True)
    subscriber.put_engines(b"old")
    for number in range(10):
        subscriber.put_view("engine-0", b"%d" % number)
    subscriber.put_view("engine-1", b"x")
    subscriber.put_engines(b"new")
    assert subscriber.take() == [b"new", b"6", b"7", b"8", b"9", b"x"]
    assert subscriber.take() == []
