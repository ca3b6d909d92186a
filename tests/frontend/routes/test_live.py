"""GET /v1/live over a real socket, before an engine that is fake but for its channel."""

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
from noria.frontend.http import connection
from noria.frontend.http.api_keys import key_digest
from noria.frontend.live.sprite_sheet import make_sprite_sheet
from noria.frontend.live.subscribers import MAX_SUBSCRIBERS, MAX_SUBSCRIBERS_PER_CLIENT, LiveSubscribers
from noria.frontend.routes import live
from noria.frontend.routes.live import resolve_live_setting
from noria.observe.logs.setup import LineHandler, logging_to
from noria.protocol.live_views import DepartureView, IterationView, RatesView, SlotView, ThumbnailView, WaitingView
from noria.protocol.messages import EngineView

_SO_ATTACH_FILTER = 26  # socket(7); the module `socket` has no name for it

RATES = RatesView(60.0, 1.0, 2.0, 3.0, 0.5, 0.9, 0.99, 4.0, 0.5, 0.75)


def seat(number):
    return SlotView(number, f"r{number}", 0, "tiny", 64, 48, "ddim", 6.5, 12, 3, 12, "normal", 1000.0, None, 1002.0)


class Wheel:
    """Turns of a fake engine: one more for each follow, as if one had come since."""

    def __init__(self, colours=((250, 0, 0), (0, 0, 250)), turns=None):
        self.colours, self.left_turns = colours, turns
        self.numbers = {}  # by incarnation

    def __call__(self, follow, incarnation, *, late=False):
        if self.left_turns == 0 and follow.seen is not None and not late:
            return None
        if self.left_turns:
            self.left_turns -= 1
        number = self.numbers[incarnation] = self.numbers.get(incarnation, 0) + 1
        seen = follow.seen or 0
        turns = tuple(IterationView(n, 1000.0, 0.1, 0.0, 0.0, 0, 2, 0) for n in range(seen + 1, number + 1))
        left = (DepartureView(number, 0, f"gone-{number}", 0, "ok"),)
        cells, pixels = (), None
        if follow.pictures:
            cells = tuple(ThumbnailView(n, f"r{n}", 0, 8, 6, 144 * n) for n in range(len(self.colours)))
            pixels = b"".join(bytes(colour) * 48 for colour in self.colours)
        seats = tuple(seat(n) for n in range(len(self.colours)))
        return EngineView(incarnation, 1001.0, number, 4, seats, (), 0, 1.5, turns, left, RATES, cells), pixels


class Stream:
    """What one watcher reads, event by event; passes over comments, as every client does."""

    def __init__(self, response):
        self.response, self._lines = response, response.iter_lines()

    def next(self, name=None):
        """The next event, (name, data); of that name, if one is given."""
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

    def wheel(self):
        return self.next("wheel")[1]


def client_at(address=None):
    """A client whose connections come from `address`, of which loopback has many."""
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address, verify=False), verify=False, timeout=60)


@contextlib.contextmanager
def watching(url, query="", address=None, **options):
    with client_at(address) as client, client.stream("GET", f"{url}/v1/live{query}", **options) as response:
        assert response.status_code == 200, response.read()
        stream = Stream(response)  # kept: a response whose lines nobody can read any more is closed
        yield stream


def refusal(url, address=None, **options):
    """The error and the seconds of Retry-After with which one more watcher is refused."""
    with client_at(address) as client, client.stream("GET", f"{url}/v1/live", **options) as response:
        assert response.status_code == 429  # else there is no end to read to
        return json.loads(response.read())["error"], int(response.headers["retry-after"])


def vanish(client):
    """Let the kernel drop all that comes to `client`, as if its cable were pulled: no packet is answered any more."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF's RET 0
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def fill(stack, url, **options):
    """As many streams as one client may have."""
    streams = [stack.enter_context(watching(url, **options)) for _ in range(MAX_SUBSCRIBERS_PER_CLIENT)]
    assert {stream.next()[0] for stream in streams} == {"engines"}
    return streams


@pytest.fixture
def site(serve, new_engine, ready):
    """A front end of its own, and its engine: `site(live="full")`."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            engine = new_engine()
            url, server = stack.enter_context(serve(Config(frontend=FrontendConfig(**options)), engine))
            ready(url)
            return url, engine, server

        yield start


def test_the_engines_come_first_and_then_every_turn_of_the_wheel_once(site):
    url, engine, _ = site()
    engine.views = Wheel()
    with watching(url) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        name, data = stream.next()
        assert name == "engines"
        (told,) = data["engines"]
        assert (told["name"], told["state"], told["device"]) == ("engine-0", "ready", "cpu")
        assert data["server"]["models"] == ["tiny"]
        views = [stream.wheel() for _ in range(5)]
    assert {view["incarnation"] for view in views} == {told["incarnation"]}
    assert {view["engine"] for view in views} == {"engine-0"}
    numbers = [turn["number"] for view in views for turn in view["turns"]]
    assert numbers == sorted(set(numbers))
    assert set(msgspec.structs.asdict(seat(0))) == set(views[0]["seats"][0])
    assert set(EngineView.__struct_fields__) | {"engine", "sheet"} == set(views[-1])
    assert views[0]["rates"]["p95_s"] == 0.9


def test_the_pictures_come_in_one_sheet(site):
    url, engine, _ = site()
    engine.views = Wheel()
    with watching(url) as stream:
        view = stream.wheel()
    assert (view["sheet"]["format"], view["sheet"]["width"], view["sheet"]["height"]) == ("jpeg", 16, 8)
    assert [(cell["slot"], cell["x"], cell["y"], cell["width_px"]) for cell in view["cells"]] == [
        (0, 0, 0, 8),
        (1, 8, 0, 8),
    ]
    assert "offset" not in view["cells"][0]


def test_the_recorded_stream_is_as_a_server_sends_it():
    """tests/data/live-stream.txt, before which pages are tested: a few seconds of a real one."""
    blocks = (pathlib.Path(__file__).parents[1] / "data" / "live-stream.txt").read_text(encoding="utf-8").split("\n\n")
    events = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks if block]
    assert events[0]["event"] == "engines"
    views = [json.loads(event["data"]) for event in events if event["event"] == "wheel"]
    assert len(views) > 10
    for view in views:
        assert (
            {*EngineView.__struct_fields__, "engine"} <= set(view) <= {*EngineView.__struct_fields__, "engine", "sheet"}
        )
        for name, kind in (
            ("seats", SlotView),
            ("waiting", WaitingView),
            ("turns", IterationView),
            ("left", DepartureView),
        ):
            msgspec.convert(view[name], list[kind])
        msgspec.convert(view["rates"], RatesView)
    assert any(len({(seat["width_px"], seat["height_px"]) for seat in view["seats"]}) > 1 for view in views)
    assert any(view["waiting"] for view in views)
    assert any(view["left"] for view in views)


@pytest.mark.parametrize(("options", "query"), [({}, "?pictures=false"), ({"live": "no-previews"}, "")])
def test_without_pictures_none_is_asked_of_the_engine(site, options, query):
    url, engine, _ = site(**options)
    engine.views = Wheel()
    with watching(url, query) as stream:
        for _ in range(3):
            view = stream.wheel()
            assert (view["cells"], "sheet" in view) == ([], False)
    assert {follow.pictures for follow in engine.follows} == {False}


def test_who_wants_no_pictures_gets_none_beside_one_who_does(site):
    url, engine, _ = site()
    engine.views = Wheel()
    with watching(url) as pictured, watching(url, "?pictures=false") as plain:
        assert "sheet" in pictured.wheel()
        for _ in range(3):
            assert "sheet" not in plain.wheel()


def test_while_nobody_watches_nothing_is_asked_of_the_engine(site, until):
    url, engine, _ = site()
    engine.views = Wheel(turns=3)
    assert engine.follows == []
    with watching(url) as stream:
        stream.wheel()
        until(lambda: len(engine.follows) == 4)  # the last one is not answered
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        until(lambda: "noria_live_watchers 0.0" in client.get("/metrics").text)
    engine.views = Wheel()
    num_asked = len(engine.follows)
    assert httpx.post(f"{url}/t2i", json={"prompt": "p"}, verify=False, timeout=60).status_code == 200
    assert len(engine.follows) == num_asked
    with watching(url) as stream:
        stream.wheel()
    assert engine.follows[num_asked].seen is None  # what was seen before is of no use


def test_who_comes_later_is_shown_the_turns_before(site, until):
    url, engine, _ = site()
    engine.views = Wheel(turns=5)
    with watching(url) as early:
        while early.wheel()["number"] < 5:
            pass
        with watching(url) as late:
            view = late.wheel()
    assert [turn["number"] for turn in view["turns"]] == [1, 2, 3, 4, 5]
    assert view["left"] == []
    assert len(view["seats"]) == 2


def test_an_engine_that_ends_is_told_and_its_next_life_followed_from_the_beginning(site, until):
    url, engine, _ = site()
    engine.views = Wheel()
    with watching(url) as stream:
        first = stream.wheel()
        num_asked = len(engine.follows)
        engine.become("dead")
        states = []
        while "unknown" not in states:
            states.append(stream.next("engines")[1]["engines"][0]["state"])
        engine.become("ready")
        while states[-1] != "ready":
            states.append(stream.next("engines")[1]["engines"][0]["state"])
        while (view := stream.wheel())["incarnation"] == first["incarnation"]:
            pass
    assert view["turns"][0]["number"] == 1
    assert any(follow.seen is None for follow in engine.follows[num_asked:])


def test_who_comes_while_an_engine_is_dead_is_not_shown_its_wheel(site):
    url, engine, _ = site()
    engine.views = Wheel()
    with watching(url) as early:
        first = early.wheel()
        engine.become("dead")
        while early.next("engines")[1]["engines"][0]["state"] != "unknown":
            pass
        with watching(url) as late:
            assert late.next()[1]["engines"][0]["state"] == "unknown"
            engine.become("ready")
            assert late.wheel()["incarnation"] != first["incarnation"]


def test_a_view_whose_pictures_are_made_while_its_engine_ends_is_shown_to_nobody(site, monkeypatch):
    url, engine, _ = site()
    engine.views = Wheel(turns=2)
    made, ended = threading.Semaphore(0), threading.Semaphore(1)  # the first view's are made at once

    def sheet_of(*given):
        made.release()
        ended.acquire(timeout=60)
        return make_sprite_sheet(*given)

    monkeypatch.setattr(live, "sheet", sheet_of)
    with watching(url) as stream:
        first = stream.wheel()
        for _ in range(2):
            assert made.acquire(timeout=60)
        engine.become("dead")
        while stream.next("engines")[1]["engines"][0]["state"] != "unknown":
            pass
        engine.views = Wheel()
        ended.release(100)
        engine.become("ready")
        assert stream.wheel()["incarnation"] != first["incarnation"]


def test_an_answer_to_those_before_keeps_no_turns_from_who_comes_after_them(site, until):
    url, engine, _ = site()
    whole, num_late = Wheel(turns=5), 0

    def views(follow, incarnation):
        """As of an engine whose answer to those before is under way when the next one comes: a turn, and no more."""
        nonlocal num_late
        if follow.seen is None and whole.left_turns == 0 and num_late == 0:
            num_late += 1
            return whole(msgspec.structs.replace(follow, seen=5), incarnation, late=True)
        return whole(follow, incarnation)

    engine.views = views
    with watching(url) as early:
        while early.wheel()["number"] < 5:
            pass
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        until(lambda: "noria_live_watchers 0.0" in client.get("/metrics").text)
    with watching(url) as stream:
        view = stream.wheel()
    assert num_late == 1
    assert [turn["number"] for turn in view["turns"]] == list(range(1, view["number"] + 1))


def test_nonsense_of_an_engine_costs_its_view(site):
    url, engine, _ = site()
    wheel = Wheel()

    def views(follow, incarnation):
        view, pixels = wheel(follow, incarnation)
        return view, pixels[:10] if view.last_iteration == 2 else pixels

    engine.views = views
    lines = []
    with logging_to(LineHandler("frontend-0", lines.append), "error"), watching(url) as stream:
        numbers = [stream.wheel()["number"] for _ in range(3)]
    assert numbers == [1, 3, 4]
    (line,) = lines
    assert line["message"] == "engine-0: its view makes no sense"
    assert "request_id" not in line  # it is nobody's in particular


@pytest.mark.parametrize(
    ("query", "field", "says"),
    [
        ("?pictures=no", "pictures", "allowed are true, false"),
        ("?picture=false", "picture", "Did you mean 'pictures'?"),
    ],
)
def test_what_is_not_a_parameter_is_refused(client, query, field, says):
    response = client.get(f"/v1/live{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert says in response.json()["error"]["message"]


def test_switched_off_it_says_by_which_setting(site):
    url, _, _ = site(live="off")
    response = httpx.get(f"{url}/v1/live", verify=False, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert "frontend.live" in response.json()["error"]["message"]


def test_with_keys_it_needs_one_and_shows_no_pictures(site, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{key_digest(b"secret")}"\n')
    url, engine, _ = site(keys_file=str(keys))
    engine.views = Wheel()
    assert httpx.get(f"{url}/v1/live", verify=False, timeout=60).status_code == 401
    with watching(url, headers={"X-Api-Key": "secret"}) as stream:
        assert stream.wheel()["cells"] == []
    assert {follow.pictures for follow in engine.follows} == {False}


def test_auto_shows_pictures_only_where_there_are_no_keys():
    assert resolve_live_setting(FrontendConfig()) == "full"
    assert resolve_live_setting(FrontendConfig(keys_file="keys.toml")) == "no-previews"
    assert resolve_live_setting(FrontendConfig(keys_file="keys.toml", live="full")) == "full"


def test_who_asks_for_the_head_alone_watches_nothing(site):
    url, engine, _ = site()
    engine.views = Wheel()
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        response = client.head("/v1/live")
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "noria_live_watchers 0.0" in client.get("/metrics").text


def test_only_so_many_may_watch(site):
    url, _, _ = site()
    with contextlib.ExitStack() as stack:
        for number in range(MAX_SUBSCRIBERS // MAX_SUBSCRIBERS_PER_CLIENT):
            fill(stack, url, address=f"127.0.0.{number + 2}")
        error, retry_after_s = refusal(url)
        assert (error["code"], error["retryable"]) == ("rate_limited", True)
        assert error["message"].startswith(f"{MAX_SUBSCRIBERS} streams of GET /v1/live are under way already")
        assert retry_after_s > 0


def test_one_client_leaves_places_for_others(site):
    url, _, _ = site()
    with contextlib.ExitStack() as stack:
        fill(stack, url, address="127.0.0.2")
        error, retry_after_s = refusal(url, address="127.0.0.2")
        assert error["code"] == "rate_limited"
        assert (
            f"the address 127.0.0.2 has {MAX_SUBSCRIBERS_PER_CLIENT} streams of GET /v1/live already"
            in error["message"]
        )
        assert retry_after_s > 0
        error, _ = refusal(url, address="127.0.0.2", headers={"X-Forwarded-For": "192.0.2.1"})
        assert "the address 127.0.0.2 has" in error["message"]  # it is no proxy, and not believed
        with watching(url) as stream:
            assert stream.next()[0] == "engines"


@pytest.mark.parametrize("leaves", ["by a close", "by a reset", "with another request waiting", "without a word"])
def test_who_leaves_frees_the_place(site, until, monkeypatch, leaves):
    monkeypatch.setattr(live, "_KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(connection, "VANISHED_TIMEOUT_S", 0.5)
    url, _, _ = site()
    host = httpx.URL(url)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_SUBSCRIBERS_PER_CLIENT - 1):
            stack.enter_context(watching(url))
        last = stack.enter_context(socket.create_connection((host.host, host.port)))
        last.sendall(b"GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert last.recv(4096).startswith(b"HTTP/1.1 200")
        refusal(url)
        match leaves:
            case "by a close":
                last.close()
            case "by a reset":
                last.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                last.close()
            case "with another request waiting":  # behind the stream: nothing more is read from it, not even its end
                last.sendall(b"GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n")
                last.close()
            case "without a word":
                vanish(last)
        until(lambda: httpx.head(f"{url}/v1/live", verify=False, timeout=60).status_code == 200)


@pytest.mark.parametrize(
    ("options", "proxy"), [({}, "127.0.0.1"), ({"trusted_proxies": ("192.0.2.9", "127.0.0.2/31")}, "127.0.0.3")]
)
def test_whom_a_trusted_proxy_names_is_a_client_of_its_own(site, options, proxy):
    url, _, _ = site(**options)
    with contextlib.ExitStack() as stack:
        fill(stack, url, address=proxy, headers={"X-Forwarded-For": "198.51.100.7, 192.0.2.1"})
        error, _ = refusal(url, address=proxy, headers={"X-Forwarded-For": "203.0.113.9, 192.0.2.1"})
        assert "the address 192.0.2.1 has" in error["message"]  # what the proxy saw, not what the client says of itself
        with watching(url, address=proxy, headers={"X-Forwarded-For": "192.0.2.2"}) as stream:
            assert stream.next()[0] == "engines"


def test_with_keys_each_is_a_client_wherever_it_comes_from(site, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[key]]\nname = "{name}"\nsha256 = "{key_digest(name.encode())}"\n' for name in "ab"))
    url, _, _ = site(keys_file=str(keys))
    with contextlib.ExitStack() as stack:
        fill(stack, url, headers={"X-Api-Key": "a"})
        error, _ = refusal(url, address="127.0.0.2", headers={"X-Api-Key": "a"})
        assert "the key 'a' has" in error["message"]
        with watching(url, headers={"X-Api-Key": "b"}) as stream:
            assert stream.next()[0] == "engines"


def test_many_who_come_and_go_leave_nothing_behind(site, until):
    url, engine, _ = site()
    engine.views = Wheel()
    host = httpx.URL(url)
    for _ in range(500):
        with socket.create_connection((host.host, host.port)) as hasty:
            hasty.sendall(b"GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n")
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        until(lambda: "noria_live_watchers 0.0" in client.get("/metrics").text)
    with contextlib.ExitStack() as stack:
        fill(stack, url)


def test_the_streams_end_when_the_server_is_to_stop(site):
    url, engine, server = site()
    engine.views = Wheel(turns=1)
    with watching(url) as stream:
        stream.wheel()
        server.should_exit = True
        assert stream.rest() == []  # whole, and soon: a connection that broke would raise


def test_who_does_not_read_holds_up_no_stop(serve, new_engine, ready, until, caplog):
    engine = new_engine()
    config = Config(frontend=FrontendConfig(drain_s=280))
    engine.views = Wheel(colours=[(n, 2 * n, 3 * n) for n in range(64)])
    with serve(config, engine) as (url, server), socket.socket() as silent:
        ready(url)
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        address = httpx.URL(url)
        silent.connect((address.host, address.port))
        silent.sendall(b"GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n")
        connections = server.server_state.connections
        until(lambda: any(each.flow is not None and each.flow.write_paused for each in list(connections)))
        server.should_exit = True
        until(lambda: not connections)  # long before the end of the 280 s that others have to read
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_who_does_not_read_loses_views_and_holds_nobody_up(site):
    url, engine, _ = site()
    engine.views = Wheel(colours=[(n, 2 * n, 3 * n) for n in range(64)])
    silent, done = threading.Event(), threading.Event()

    def stall():
        with watching(url):
            silent.set()
            done.wait(120)

    thread = threading.Thread(target=stall)
    thread.start()
    assert silent.wait(60)
    try:
        with watching(url) as stream:
            numbers = [stream.wheel()["number"] for _ in range(300)]
    finally:
        done.set()
        thread.join()
    assert len(set(numbers)) >= 299  # the first may be the newest of those that the silent one has had


def test_a_mailbox_keeps_the_newest_views_of_each_engine_and_the_newest_state():
    watcher = LiveSubscribers().add("the address 192.0.2.1", wants_thumbnails=True)
    watcher.put_engines(b"old")
    for number in range(10):
        watcher.put_view("engine-0", b"%d" % number)
    watcher.put_view("engine-1", b"x")
    watcher.put_engines(b"new")
    assert watcher.take() == [b"new", b"6", b"7", b"8", b"9", b"x"]
    assert watcher.take() == []
