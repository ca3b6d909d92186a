"""A client that leaves frees its engine: on every route that computes, however it sends its body and leaves."""

import asyncio
import json
import socket
import struct

import httpx
import msgspec
import pytest
import uvicorn.protocols.http.httptools_impl
from starlette.requests import Request

from certificates import make_certificate
from frontends import serving
from noria.config import Config, EndpointConfig, EngineConfig, FrontendConfig
from noria.errors import RequestCancelled
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.disconnects import DisconnectWatcher, cancel_on_disconnect
from noria.testing.fake_encoder import FAKE_ENCODER, LATE, SPARSE
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from uploads import b64, file_of, photo
from waiting import wait_until

CODE = """
class Texts:
    def preprocess(self, body, state):
        return body["inputs"]

class Caller:
    def preprocess(self, body, state):
        state.body = body

    async def postprocess(self, result, state):
        return await state.call("tiny", {"prompt": "p"})
"""
LARGE = 200_000  # bytes
PHOTO = file_of(photo((300, 240)))  # 216 kB of random pixels
GENERATION = {"prompt": "p", "inference_steps": 50}
TEXTS = [f"text {number}" for number in range(200)]
TENSOR = {"name": "TEXT", "datatype": "BYTES", "shape": [200]}


def with_labels(name, task, *labels):
    return msgspec.structs.replace(
        FAKE_ENCODER, name=name, task=task, labels=labels, dimensions=len(labels), pooling=()
    )


MODELS = (
    FAKE_MODEL,
    FAKE_ENCODER,
    with_labels("moods", "classification", "bad", "good"),
    with_labels("ranker", "reranking", "LABEL_0"),
    with_labels("names", "token_classification", "O", "B-PER"),
    SPARSE,
    LATE,
)


@pytest.fixture(scope="module")
def all_models(folder):
    with FakeEngine(f"ipc://{folder}/disconnects", models=MODELS, load=FAKE_LOAD) as engine:
        yield engine


@pytest.fixture(scope="module", params=["plain", "TLS"])
def all_routes(request, all_models, tmp_path_factory):
    """A server with every route, over HTTP and over HTTPS, and what makes connections to it."""
    path = tmp_path_factory.mktemp("code")
    (path / "code.py").write_text(CODE)
    (path / "tiny.safetensors").write_bytes(b"an upscaler")
    certificate = make_certificate(path) if request.param == "TLS" else None
    files = {} if certificate is None else {"ssl_certfile": certificate.certfile, "ssl_keyfile": certificate.keyfile}
    config = Config(
        endpoints=tuple(EndpointConfig(name.lower(), f"{path}/code.py:{name}") for name in ("Texts", "Caller")),
        engine=EngineConfig(upscalers=(str(path),)),
        frontend=FrontendConfig(**files),
    )
    with pytest.MonkeyPatch.context() as patch, serving(config, all_models) as (url, _):
        # 64 KiB by default, which the last piece of a body has only sometimes; then reading is paused.
        patch.setattr(uvicorn.protocols.http.httptools_impl, "HIGH_WATER_LIMIT", 1000)
        wait_until(lambda: httpx.get(f"{url}/readyz", verify=False).status_code == 200)
        httpx.post(f"{url}/v1/endpoints/caller", json={"inputs": []}, verify=False)  # starts a loop that stays
        host = httpx.URL(url)

        def connect():
            connection = socket.create_connection((host.host, host.port), 60)
            if certificate is None:
                return connection
            return certificate.client_context().wrap_socket(connection, server_hostname="localhost")

        yield url, connect


@pytest.fixture
def connect(all_routes, all_models):
    all_models.reset()
    all_models.never_answers = True
    yield all_routes[1]
    all_models.reset()


def json_body(**fields):
    """A body of `LARGE` bytes, and its type; spaces are as good as values to what reads it."""
    return json.dumps(fields).encode().ljust(LARGE), "application/json"


def form(files, **fields):
    parts = [*files.items(), *((name, (None, value)) for name, value in fields.items())]
    request = httpx.Request("POST", "http://localhost", files=parts)
    return request.read().ljust(LARGE), request.headers["content-type"]


IMAGE = {"image": ("a.png", PHOTO)}
ROUTES = {
    "/t2i": json_body(**GENERATION),
    "/t2i with an image": json_body(**GENERATION, image=b64(PHOTO)),
    "/t2i as a form": form(IMAGE, prompt="p"),
    "/t2i as a stream": json_body(**GENERATION, stream=True),
    "/v1/images/generations": json_body(prompt="p"),
    "/v1/images/generations as a stream": json_body(prompt="p", stream=True, partial_images=2),
    "/v1/images/generations as a form": form({}, prompt="p"),
    "/v1/images/edits": form(IMAGE, prompt="p"),
    "/v1/images/edits as a stream": form(IMAGE, prompt="p", stream="true"),
    "/sdapi/v1/txt2img": json_body(prompt="p", steps=50),
    "/sdapi/v1/img2img": json_body(prompt="p", init_images=[b64(PHOTO)]),
    "/sdapi/v1/extra-single-image": json_body(image=b64(PHOTO), upscaler_1="tiny"),
    "/sdapi/v1/extra-batch-images": json_body(imageList=[{"data": b64(PHOTO)}], upscaler_1="tiny"),
    "/v1/embeddings": json_body(input=TEXTS),
    "/embed": json_body(inputs=TEXTS),
    "/": json_body(inputs=TEXTS),
    "/ of tokens": json_body(inputs=TEXTS, model="names"),
    "/embed_sparse": json_body(inputs=TEXTS),
    "/embed_all": json_body(inputs=TEXTS),
    "/predict": json_body(inputs=[[text] for text in TEXTS]),
    "/rerank": json_body(query="q", texts=TEXTS),
    "/v1/rerank": json_body(query="q", documents=TEXTS),
    "/v2/rerank": json_body(query="q", documents=TEXTS),
    "/similarity": json_body(inputs={"source_sentence": "q", "sentences": TEXTS}),
    "/v2/models/fake-encoder/infer": json_body(inputs=[TENSOR | {"data": TEXTS}]),
    "/v2/models/fake-encoder/versions/1/infer": json_body(inputs=[TENSOR | {"data": TEXTS}]),
    "/v1/endpoints/texts": json_body(inputs=TEXTS),
    "/v1/endpoints/caller": json_body(inputs=[]),
}
"""A large body of each route, and its type. A path is followed by what is particular."""

COMPUTE_NOTHING = {
    "/tokenize",
    "/v1/images/metadata",
    "/v1/images/variations",
    "/sdapi/v1/options",
    "/sdapi/v1/interrupt",
    "/sdapi/v1/skip",
    "/controlnet/detect",
    "/v2/repository/index",
    "/v2/repository/models/{model:path}/load",
    "/v2/repository/models/{model:path}/unload",
}


def test_the_table_has_every_route_that_computes():
    paths = {
        operation.path
        for operation in build_app(Config(), EnginePool([])).state.operations
        if operation.method == "POST" and "generate" in (operation.scopes or ())
    }
    patterns = {
        "/v1/endpoints/{name}": "/v1/endpoints/texts",
        "/v2/models/{model:path}/infer": "/v2/models/fake-encoder/infer",
        "/v2/models/{model:path}/versions/{version}/infer": "/v2/models/fake-encoder/versions/1/infer",
    }
    assert {patterns.get(path, path) for path in paths - COMPUTE_NOTHING} == {
        name.partition(" ")[0] for name in ROUTES
    } - {"/v1/endpoints/caller"}


def send(connection, path, body, media_type, *, version="1.1", chunked=False, waits=True):
    """Send a request. If it `waits`, its body follows when the server reads it, as curl sends a long one."""
    waits = waits and version == "1.1"
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    expect = "Expect: 100-continue\r\n" if waits else ""
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: {media_type}\r\n{expect}{framing}\r\n\r\n"
    if chunked:
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:100], body[100:])) + b"0\r\n\r\n"
    connection.sendall(head.encode())
    if waits:
        assert b" 100 Continue" in connection.recv(4096)
    connection.sendall(body)


def send_large(connection, name, **options):
    send(connection, name.partition(" ")[0], *ROUTES[name], **options)


def assert_cancelled(engine, num_requests=1):
    wait_until(lambda: len(engine.cancelled) >= num_requests, 10)
    assert sorted(engine.cancelled) == sorted(request.attempt_id for request in engine.submitted)


@pytest.mark.parametrize(
    ("all_routes", "name"),
    [(("plain", "TLS")[number % 2], name) for number, name in enumerate(ROUTES)],
    indirect=["all_routes"],
)
def test_a_client_that_leaves_after_a_large_body_is_cancelled(all_routes, connect, all_models, name):
    with connect() as connection:
        send_large(connection, name)
        wait_until(lambda: all_models.submitted, 10)
        assert not all_models.cancelled
    assert_cancelled(all_models)
    all_models.never_answers = False
    answer = httpx.post(f"{all_routes[0]}/embed", json={"inputs": "a"}, verify=False)
    assert answer.status_code == 200


def close(connection):
    connection.close()


def close_own_side(connection):
    connection.shutdown(socket.SHUT_WR)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    ("leave", "name"), [(close, "/t2i as a stream"), (close_own_side, "/embed"), (reset, "/embed")]
)
@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        pytest.param(0, {}, 0, id="content-length"),
        pytest.param(0, {"chunked": True}, 0, id="chunked"),
        pytest.param(0, {"version": "1.0"}, 0, id="HTTP/1.0"),
        pytest.param(2, {}, 0, id="after others, as of a proxy"),
        pytest.param(0, {}, 1, id="another waits"),
        pytest.param(0, {}, 3, id="several wait"),
    ],
)
def test_a_client_that_leaves_is_noticed_however_it_sends_and_leaves(
    connect, all_models, leave, name, before, options, after
):
    with connect() as connection:
        for _ in range(before):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not connection.recv(4096).endswith(b"}"):  # TLS delivers head and body in a record each
                pass
        send_large(connection, name, **options)
        wait_until(lambda: all_models.submitted, 10)
        for _ in range(after):  # pipelined: what follows them is not read before they are answered
            send_large(connection, "/embed", waits=False)
        leave(connection)
        assert_cancelled(all_models)
    assert len(all_models.submitted) == 1


def test_a_client_that_leaves_in_its_body_has_computed_nothing(connect, all_models):
    body, media_type = ROUTES["/embed"]
    with connect() as connection:
        head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + body[:-1])
    with connect() as other:
        send_large(other, "/t2i")
        wait_until(lambda: all_models.submitted, 10)
    assert_cancelled(all_models)
    assert all_models.submitted[0].model == "tiny"


def test_one_client_leaves_and_the_others_are_answered(all_routes, connect, all_models):
    with connect() as leaving, connect() as staying:
        send_large(leaving, "/embed")
        send_large(staying, "/t2i as a stream")
        wait_until(lambda: len(all_models.submitted) == 2)
        leaving.close()
        wait_until(lambda: all_models.cancelled)
        (text,) = (request for request in all_models.submitted if request.model == "fake-encoder")
        assert all_models.cancelled == [text.attempt_id]
        all_models.set_state("dead")
        all_models.never_answers = False
        all_models.set_state("ready")
        received = b""
        while b"event: finished" not in received:
            received += staying.recv(65536)
    assert all_models.cancelled == [text.attempt_id]


def test_pipelined_requests_with_large_bodies_are_answered_in_order(all_routes, connect, all_models):
    all_models.never_answers = False
    with connect() as connection:
        for _ in range(3):
            send_large(connection, "/embed", waits=False)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 6:
            piece = connection.recv(65536)
            assert piece, received[-300:]
            received += piece
    assert not all_models.cancelled


class Receiver:
    """`receive` of a server that tells of a disconnect to callers only; `disconnect` makes it do so."""

    def __init__(self, *body):
        self._messages = asyncio.Queue()
        for number, piece in enumerate(body, 1):
            self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": number < len(body)})

    async def __call__(self):
        return await self._messages.get()

    def disconnect(self):
        self._messages.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_server_that_tells_of_disconnects_to_receivers_only_is_watched(reads, is_early):
    async def run():
        receiver, outcome = Receiver(b"a", b"b") if reads else Receiver(b""), []
        watcher = DisconnectWatcher(receiver)

        async def work(http):
            if reads:
                assert [(await http.receive())["body"] for _ in "ab"] == [b"a", b"b"]
            if not is_early:
                receiver.disconnect()
            await asyncio.sleep(60)

        async def application():
            scope = {"type": "http", "state": {"watch_disconnect": watcher.watch_disconnect}}
            http = Request(scope, watcher.receive)
            if is_early:
                receiver.disconnect()
            try:
                await cancel_on_disconnect(http, work(http))
            except RequestCancelled as error:
                outcome.append(error)
            while (await http.receive())["type"] == "http.request":
                pass

        await asyncio.wait_for(watcher.run(application()), 10)
        assert len(outcome) == 1

    asyncio.run(run())


def test_a_request_that_ends_does_not_end_the_watch_of_the_next_one_on_its_connection():
    async def run():
        receiver, first_ends = Receiver(), asyncio.Event()
        watcher = DisconnectWatcher(receiver)
        http = Request({"type": "http", "state": {"watch_disconnect": watcher.watch_disconnect}})

        async def application():
            first = asyncio.create_task(cancel_on_disconnect(http, first_ends.wait()))
            await asyncio.sleep(0)
            following = asyncio.create_task(cancel_on_disconnect(http, asyncio.sleep(60)))
            await asyncio.sleep(0)
            first_ends.set()
            await first
            receiver.disconnect()
            with pytest.raises(RequestCancelled):
                await following

        await asyncio.wait_for(watcher.run(application()), 10)

    asyncio.run(run())
