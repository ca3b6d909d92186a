"""The whole application behind its connection class, without sockets: bytes go in in chunks, responses come out.

In front of a fake engine, in one event loop that runs only while an input is served.
"""

import asyncio
import contextlib
import logging
import pathlib
import random
import shutil
import socket
import tempfile
import traceback
import zlib
from unittest import mock

import msgspec
from uvicorn.server import ServerState

from controlnet_folders import save_controlnet, save_model
from noria.config import Config, EndpointConfig, EngineConfig, FrontendConfig, JobsConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.process import http_server
from noria.frontend.server.connection import TimeoutHttpProtocol
from noria.jobs.webhooks.resolver import Resolver
from noria.observe.logs.log_record import as_json, as_text
from noria.observe.logs.setup import LineHandler, logging_to
from noria.testing.fake_encoder import FAKE_ENCODER, FakeTokenizer
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until_async

MAX_BODY_BYTES = 16_384
CODE = "class Lengths:\n    def postprocess(self, result, state):\n        return (result.rows**2).sum(axis=1)\n"
# No loading of models at run time, no engine or database, and a deadline that has passed: all are documented.
ALLOWED_5XX = {501, 503, 504}
_STALLED_S = 60.0  # no request takes so long: the engine answers at once
_STREAM_S = 0.02  # how long a stream of events is read before its client disconnects


class InProcessServer:
    """Serves connections one at a time. Use it as a context manager."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._failures = []
        self._statuses = []
        self.bodies = []  # bodies of the last connection's responses, in pieces

    def __enter__(self):
        self._stack.enter_context(logging_to(_Log(self._note), "debug"))
        folder = pathlib.Path(tempfile.mkdtemp(prefix="noria-fuzz-"))
        self._stack.callback(shutil.rmtree, folder)
        model = msgspec.structs.replace(FAKE_MODEL, folder=str(save_model(folder / "model")))
        engine = self._stack.enter_context(FakeEngine(f"ipc://{folder}/engine", models=(model, FAKE_ENCODER)))
        self._loop = asyncio.new_event_loop()
        self._stack.callback(self._loop.close)
        self._stack.callback(lambda: self._loop.run_until_complete(self._loop.shutdown_default_executor()))
        self._loop.set_exception_handler(lambda _, context: self._note(str(context)))
        self._sockets = self._stack.enter_context(_connected_sockets())
        (folder / "code.py").write_text(CODE)
        config = Config(
            data_dir=str(folder / "data"),
            engine=EngineConfig(controlnets=(str(save_controlnet(folder / "edges")),)),
            endpoints=(EndpointConfig("lengths", f"{folder}/code.py:Lengths"),),
            frontend=FrontendConfig(max_body_bytes=MAX_BODY_BYTES, max_images=2, max_steps=20, max_prompt_chars=500),
            jobs=JobsConfig(max_queued=16, ttl_s=60),
        )
        self._stack.enter_context(mock.patch("noria.jobs.service.Resolver", new=_find_no_host))
        pool = EnginePool([engine.address])
        self.app = build_app(config, pool, load_tokenizer=FakeTokenizer)
        self._config = http_server(self.app, config.frontend).config
        self._config.load()
        self._config.loaded_app = self._noting_responses(self._config.loaded_app)
        self._state = ServerState()
        self._loop.run_until_complete(self.app.state.load())
        lifespan = self.app.router.lifespan_context(self.app)
        self._loop.run_until_complete(lifespan.__aenter__())
        self._stack.callback(lambda: self._loop.run_until_complete(lifespan.__aexit__(None, None, None)))
        self._stack.callback(self.app.state.drain)
        self._loop.run_until_complete(wait_until_async(lambda: pool.ready))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def serve(self, data):
        """Send the bytes of one connection, in chunks that depend on them alone; return the statuses.

        Raises AssertionError for an error of the server, and for a connection that is neither closed nor has a timer.
        """
        self._failures, self._statuses, self.bodies = [], [], []
        return self._loop.run_until_complete(self._serve(data))

    async def _serve(self, data):
        transport = Transport(self._loop, self._sockets)
        protocol = transport.protocol = TimeoutHttpProtocol(self._config, self._state, {}, self._loop)
        protocol.connection_made(transport)
        for chunk in _chunks(data):
            if transport.is_paused:
                await self._wait_for_responses(protocol)
            if transport.is_closed or transport.is_paused:
                break
            protocol.data_received(chunk)
            await asyncio.sleep(0)
        await self._wait_for_responses(protocol)
        self._check_is_closed_or_timed(protocol, transport)
        transport.abort()  # the client disconnects
        await asyncio.sleep(0)
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_STALLED_S)
        assert not self._state.tasks, "a request goes on without its client"
        timers = (protocol._head_timer, protocol._stall_timer, protocol.timeout_keep_alive_task)
        assert timers == (None, None, None), f"a closed connection has timers: {timers}"
        assert not self._failures, "\n".join(self._failures)
        errors = [status for status in self._statuses if status >= 500 and status not in ALLOWED_5XX]
        assert not errors, f"answered {errors}"
        return self._statuses

    async def _wait_for_responses(self, protocol):
        """Wait until every complete request is answered; streams are read for a moment."""
        deadline = self._loop.time() + _STALLED_S
        while self._state.tasks:
            cycle = protocol.cycle
            is_last = not protocol.pipeline
            if is_last and cycle.more_body and not cycle.response_started:
                for _ in range(3):  # it may be rejected before its body arrives
                    await asyncio.sleep(0)
                return
            has_begun = cycle.response_started
            _, pending = await asyncio.wait(self._state.tasks, timeout=_STREAM_S)
            if pending and has_begun and is_last:
                return
            assert self._loop.time() < deadline, "no response"

    @staticmethod
    def _check_is_closed_or_timed(protocol, transport):
        """A connection whose response says so is closed; any other one waits for a request's end or for a timer."""
        if any(b"\r\nconnection: close" in head for head in transport.heads):
            cycle = protocol.cycle
            assert transport.is_closed or not cycle.response_complete, "open after `Connection: close`"
        is_answering = protocol.cycle is not None and not protocol.cycle.response_complete
        timers = (protocol._head_timer, protocol._stall_timer, protocol.timeout_keep_alive_task)
        assert transport.is_closed or is_answering or any(timers), "an idle connection without a timer"

    def _noting_responses(self, app):
        async def noting(scope, receive, send):
            async def note(message):
                if message["type"] == "http.response.start":
                    self._statuses.append(message["status"])
                else:
                    self.bodies.append(message.get("body"))
                await send(message)

            await app(scope, receive, note)

        return noting

    def _note(self, failure):
        self._failures.append(failure)


class _Log(LineHandler):
    """Formats every line as text and as JSON, since it may have parts of a request in it; passes errors to `note`."""

    def __init__(self, note):
        super().__init__("fuzz", lambda line: (as_json(line), as_text(line, coloured=True)))
        self._note = note

    def emit(self, record):
        if record.levelno >= logging.ERROR:
            self._note(logging.Formatter().format(record))
        super().emit(record)

    def handleError(self, record):  # noqa: N802 - of logging.Handler
        self._note(f"not formatted: {traceback.format_exc()}")


class Transport(asyncio.Transport):
    """Keeps the heads of what is written. Its client reads everything at once."""

    def __init__(self, loop, sockets):
        super().__init__({"socket": sockets[0]})
        self._loop = loop
        self.is_paused = self.is_closed = self.is_lost = False
        self.heads = []

    def write(self, data):
        if self.is_lost:
            raise RuntimeError("the handler is closed")  # as uvloop's
        if data.startswith(b"HTTP/1."):
            self.heads.append(bytes(data).partition(b"\r\n\r\n")[0].lower())

    def writelines(self, pieces):
        self.write(b"".join(pieces))

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def is_closing(self):
        return self.is_closed

    def close(self):
        if not self.is_closed:
            self.is_closed = True
            self._loop.call_soon(self._lose)

    abort = close

    def _lose(self):
        self.is_lost = True
        self.protocol.connection_lost(None)


def framed(request):
    """An HTTP request of a head without Host and Content-Length, an empty line, and a body."""
    head, _, body = request.partition(b"\n\n")
    lines = [line.strip(b"\r") for line in head.split(b"\n")]
    first, fields = lines[0], lines[1:]
    fields += [b"Host: localhost", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([first + b" HTTP/1.1", *fields, b"", body])


def _chunks(data):
    chooser = random.Random(zlib.crc32(data))
    if chooser.random() < 0.5:
        yield data
        return
    while data:
        size = chooser.choice((1, 2, 7, 64, 1024, 16_384))
        yield data[:size]
        data = data[size:]


@contextlib.contextmanager
def _connected_sockets():
    """Two ends of a TCP connection, for the options and counters of sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield server, client


def _find_no_host():
    """A resolver that asks no name server, so that no webhook of a generated job is accepted."""

    def look_up(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    return Resolver(look_up)
