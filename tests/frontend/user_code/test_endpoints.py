"""Endpoints with user code, in front of a fake engine: what the code gets, may do, and does wrong."""

import concurrent.futures
import sys
import textwrap
import threading

import httpx
import numpy as np
import pytest

from frontends import serving
from noria.config import Config, EndpointConfig, FrontendConfig
from noria.frontend.user_code import endpoints as endpoints_module
from noria.frontend.user_code import event_loop as event_loop_module
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from waiting import wait_until

NUM_THREADS = 2
CODE = """
    import asyncio, sys, threading
    import numpy as np
    from noria.user_code import InvalidInput
    from noria.errors import NoriaError

    began, ended = threading.Event(), threading.Event()

    class Sync:
        statistics = {"length": (1, 2, 4)}

        def load(self, ctx):
            self.ctx = ctx

        def preprocess(self, body, state):
            state.thread = threading.current_thread().name
            state.record("length", len(body["texts"]))
            return {"inputs": body["texts"], "dimensions": 3}

        def postprocess(self, result, state):
            return {
                "rows": result.rows, "first": result.rows[0, 0], "shape": np.int64(len(result.rows)), "none": None,
                "tokens": result.num_tokens, "cut": result.num_truncated, "model": result.spec.name,
                "id": state.request_id, "thread": state.thread,
                "settings": dict(self.ctx.settings),
            }

    class Async:
        async def load(self, ctx):
            self.prefix = ctx.settings["prefix"]
            self.loop = asyncio.get_running_loop()

        async def preprocess(self, body, state):
            assert self.loop is asyncio.get_running_loop()
            assert threading.current_thread().name == "user-code-loop"
            return [(self.prefix, text) for text in body["texts"]]

    class Plain:
        def postprocess(self, result, state):
            return len(result.rows)

    class Caller:
        def preprocess(self, body, state):
            state.body = body

        async def postprocess(self, result, state):
            assert result is None
            try:
                returned = await state.call(state.body["name"], state.body["body"])
            except NoriaError as error:
                if state.body.get("catch"):
                    return error.code
                raise
            return returned.rows if hasattr(returned, "rows") else returned

    class Loop:
        def preprocess(self, body, state):
            pass

        async def postprocess(self, result, state):
            return await state.call("loop", {})

    class Wrong:
        def preprocess(self, body, state):
            match body["how"]:
                case "input":
                    raise InvalidInput("no such thing.", field="how")
                case "raise":
                    raise KeyError("a secret")
                case "exit":
                    sys.exit(3)
                case "stop":
                    raise StopIteration
                case "return":
                    return 5
                case "record":
                    state.record("other", 1)
                case "wait":
                    ended.wait(60)
                case "json":
                    return "a"

        async def postprocess(self, result, state):
            return object()

    class WrongAsync:
        async def preprocess(self, body, state):
            match body["how"]:
                case "raise":
                    raise KeyError("a secret")
                case "exit":
                    sys.exit(3)
                case "cancel":
                    raise asyncio.CancelledError
                case "wait":
                    await asyncio.sleep(60)
                case "block":
                    began.set()
                    ended.wait(60)
                case "exit task":
                    await asyncio.create_task(asyncio.to_thread(sys.exit, 3))
                case "stubborn":
                    try:
                        await asyncio.sleep(60)
                    finally:
                        ended.clear()
                        await asyncio.sleep(0.05)
                        ended.set()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "code.py"
    file.write_text(textwrap.dedent(CODE))
    return file


@pytest.fixture(scope="module")
def replaced_file(file):
    (file.parent / "replaced.py").write_text("class Replaced:\n    def preprocess(self, body, state): return 'one'\n")
    return file.parent / "replaced.py"


@pytest.fixture(scope="module")
def text_engine(folder):
    with FakeEngine(f"ipc://{folder}/user-code", models=(FAKE_MODEL, FAKE_ENCODER), load=FAKE_LOAD) as engine:
        yield engine


@pytest.fixture(scope="module")
def server_url(file, replaced_file, text_engine):
    def endpoint(name, class_name, **changes):
        return EndpointConfig(name, f"{file}:{class_name}", **changes)

    config = Config(
        endpoints=(
            endpoint("sync", "Sync", settings={"a": [1]}),
            endpoint("async", "Async", settings={"prefix": "query"}),
            endpoint("plain", "Plain", model="fake-encoder"),
            endpoint("caller", "Caller"),
            endpoint("impatient-caller", "Caller", timeout_s=1),
            endpoint("loop", "Loop"),
            endpoint("wrong", "Wrong", timeout_s=1),
            endpoint("wrong-async", "WrongAsync", timeout_s=1),
            EndpointConfig("replaced", f"{replaced_file}:Replaced"),
        ),
        frontend=FrontendConfig(user_code_threads=NUM_THREADS),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints_module, "_POLL_INTERVAL_S", 0.05)
        with serving(config, text_engine) as (url, _):
            wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            yield url


@pytest.fixture
def web(server_url, text_engine):
    text_engine.reset()
    with httpx.Client(base_url=server_url, timeout=60) as client:
        client.engine = text_engine
        yield client


def post(web, name, headers=None, /, **body):
    return web.post(f"/v1/endpoints/{name}", json=body, headers=headers)


def vector(*words):
    return fake_vector([1, *map(word_id, words), 2])


def error_of(answer):
    return answer.json()["error"]


def metrics(web, *lines):
    """Return the values of the metrics that the lines begin with; 0 without a line."""
    page = web.get("/metrics").text.splitlines()
    found = [next((each for each in page if each.startswith(line)), "0") for line in lines]
    return [float(each.rpartition(" ")[2]) for each in found]


def test_the_bodys_texts_are_encoded_and_the_response_is_what_postprocess_returns(web):
    answer = post(web, "sync", {"X-Request-Id": "abc"}, texts=["a cat", "dogs"])
    got = answer.json()
    np.testing.assert_allclose(got.pop("rows"), [vector("a", "cat")[:3], vector("dogs")[:3]], rtol=1e-6)
    assert got.pop("first") == pytest.approx(vector("a", "cat")[0])
    assert got.pop("thread").startswith("user-code-")
    settings = {"model": "fake-encoder", "id": "abc", "settings": {"a": [1]}}
    assert got == {"shape": 2, "none": None, "tokens": 7, "cut": 0} | settings
    (request,) = web.engine.submitted
    assert (request.request_id, request.payload.dimensions) == ("abc", 3)
    assert post(web, "sync", texts=["a " * 100, "dogs"]).json()["cut"] == 1


def test_async_code_may_return_pairs_and_rows_are_the_response_without_postprocess(web):
    np.testing.assert_allclose(post(web, "async", texts=["a"]).json(), [vector("query", "a")], rtol=1e-6)


def test_without_preprocess_the_body_has_the_inputs(web):
    assert post(web, "plain", inputs=["a", ["b", "c"]]).json() == 2
    assert post(web, "plain", inputs="a").json() == 1
    rejected = post(web, "plain", inputs=5)
    assert (rejected.status_code, error_of(rejected)["param"]) == (400, "inputs")
    assert "unknown field 'input'" in error_of(post(web, "plain", input="a"))["message"]


@pytest.mark.parametrize("content", [b"[1]", b"5", b"{", b""])
def test_a_body_is_an_object(web, content):
    answer = web.post("/v1/endpoints/sync", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_body")


def test_an_unknown_endpoint_is_404(web):
    answer = post(web, "synk")
    assert answer.status_code == 404
    assert "Did you mean 'sync'?" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("name", "how", "error"),
    [
        ("wrong", "raise", "KeyError"),
        ("wrong", "exit", "SystemExit"),
        ("wrong", "stop", "StopIteration"),
        ("wrong", "record", "ValueError"),
        ("wrong", "json", "TypeError"),
        ("wrong-async", "raise", "KeyError"),
        ("wrong-async", "exit", "SystemExit"),
        ("wrong-async", "exit task", "SystemExit"),
        ("wrong-async", "cancel", "CancelledError"),
    ],
)
def test_an_exception_is_an_error_of_its_request_alone(web, captured_log_fields, caplog, name, how, error):
    with captured_log_fields("noria.user_code") as lines:
        answer = post(web, name, {"X-Request-Id": "abc"}, how=how)
    got = error_of(answer)
    assert (answer.status_code, got["code"]) == (500, "user_code_failed")
    assert f"with {error}; the server's log has the details under abc." in got["message"]
    assert "secret" not in answer.text
    assert [(line["event"], line["endpoint"]) for line in lines()] == [("user_code_failed", name)]
    assert next(each for each in caplog.records if each.name == "noria.user_code").exc_info
    assert post(web, "plain", inputs="a").json() == 1


def test_what_the_client_did_wrong_is_400(web, captured_log_fields):
    with captured_log_fields("noria.requests") as lines:
        answer = post(web, "wrong", how="input")
        wait_until(lines)
    got = error_of(answer)
    assert (answer.status_code, got["code"], got["param"], got["message"]) == (
        400, "invalid_field", "how", "no such thing.",
    )  # fmt: skip
    (line,) = lines()
    assert (line["endpoint"], line["outcome"], line["path"]) == ("wrong", "invalid_field", "/v1/endpoints/wrong")


def test_preprocess_that_returns_no_texts_is_said_to(web):
    got = error_of(post(web, "wrong", how="return"))
    assert got["code"] == "user_code_failed"
    assert "preprocess of endpoint 'wrong' returned 'int'" in got["message"]


@pytest.mark.parametrize("how", ["wait", "stubborn"])
def test_async_code_that_is_late_is_504(web, how):
    answer = post(web, "wrong-async", how=how)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    assert "preprocess of endpoint 'wrong-async' did not return within 1 s" in error_of(answer)["message"]


def test_calls_that_do_not_end_keep_their_threads_and_when_all_do_further_calls_are_503(web, captured_log_fields):
    ended = sys.modules["noria_endpoint_wrong"].ended  # for which its calls wait
    try:
        with captured_log_fields("noria.user_code") as lines:
            for _ in range(NUM_THREADS):
                assert post(web, "plain", inputs="a").status_code == 200
                assert post(web, "wrong", how="wait").status_code == 504
            answer = post(web, "wrong", how="raise")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "user_code_busy")
        assert answer.headers["retry-after"] == "5"
        assert sorted(line["event"] for line in lines()) == ["user_code_late"] * NUM_THREADS + ["user_code_stuck"]
        assert metrics(web, "noria_user_code_stuck_threads") == [NUM_THREADS]
        assert post(web, "async", texts=["a"]).status_code == 200
    finally:
        ended.set()
    wait_until(lambda: post(web, "plain", inputs="a").status_code == 200)
    wait_until(lambda: metrics(web, "noria_user_code_stuck_threads") == [0])
    ended.clear()


def test_async_code_that_blocks_delays_other_async_code_alone(web, monkeypatch):
    monkeypatch.setattr(event_loop_module, "_MAX_WAITING", 2)
    module = sys.modules["noria_endpoint_wrong_async"]
    module.ended.clear()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as users:
            blocking = users.submit(post, web, "wrong-async", how="block")
            assert module.began.wait(60)
            assert post(web, "plain", inputs="a").status_code == web.get("/healthz").status_code == 200
            waiting = [post(web, "async", {"X-Noria-Deadline-Ms": "50"}, texts=["a"]) for _ in range(3)]
            assert blocking.result().status_code == 504
    finally:
        module.ended.set()
    assert [error_of(each)["code"] for each in waiting] == ["deadline_exceeded", "deadline_exceeded", "user_code_busy"]
    wait_until(lambda: post(web, "async", texts=["a"]).status_code == 200)


def test_code_calls_text_encoders_images_and_endpoints(web):
    rows = post(web, "caller", name="fake-encoder", body={"inputs": ["a"]}).json()
    np.testing.assert_allclose(rows, [vector("a")], rtol=1e-6)
    image = post(web, "caller", {"X-Request-Id": "abc"}, name="tiny", body={"prompt": "p", "seed": 7}).json()
    assert (image["model"], image["request_id"], image["images"][0]["seed"]) == ("tiny", "abc", 7)
    assert post(web, "caller", name="plain", body={"inputs": ["a", "b"]}).json() == 2


def test_an_error_of_a_call_is_the_requests_unless_it_is_caught(web):
    wrong_size = {"name": "tiny", "body": {"prompt": "p", "width": 3}}
    assert error_of(post(web, "caller", **wrong_size))["param"] == "width"
    assert post(web, "caller", **wrong_size, catch=True).json() == "invalid_field"
    unknown = error_of(post(web, "caller", name="tinny", body={}))
    assert unknown["code"] == "model_not_found"
    assert "'tinny' is no endpoint or model" in unknown["message"]
    assert "4 endpoints already wait" in error_of(post(web, "loop"))["message"]


def test_calls_have_the_requests_deadline_priority_and_trace(web, caller):
    headers = {"X-Noria-Deadline-Ms": "5000", "X-Noria-Priority": "low", "traceparent": caller.traceparent}
    post(web, "caller", headers, name="tiny", body={"prompt": "p"})
    post(web, "caller", headers, name="plain", body={"inputs": "a"})
    for request in web.engine.submitted:
        assert 1.0 < request.deadline_s < 5.0
        assert request.priority == "low"
        assert request.traceparent.split("-")[1] == caller.trace_id
    assert len(web.engine.submitted) == 2
    late = post(web, "sync", {"X-Noria-Deadline-Ms": "0"}, texts=["a"])
    assert error_of(late)["message"] == "deadline_ms is 0; allowed are 1 to 600000."


def test_a_call_of_code_that_is_late_is_cancelled(web):
    web.engine.never_answers = True
    assert post(web, "impatient-caller", name="tiny", body={"prompt": "p"}).status_code == 504
    wait_until(lambda: web.engine.cancelled)
    assert web.engine.cancelled == [web.engine.submitted[0].attempt_id]


def test_statistics_have_their_own_buckets_and_requests_are_counted(web):
    version = FAKE_ENCODER.fingerprint
    names = [
        f'noria_stat_length_bucket{{endpoint="sync",le="2.0",version="{version}"}}',
        f'noria_stat_length_bucket{{endpoint="sync",le="4.0",version="{version}"}}',
        f'noria_stat_length_sum{{endpoint="sync",version="{version}"}}',
        'noria_endpoint_requests_total{endpoint="sync",outcome="ok"}',
        'noria_endpoint_requests_total{endpoint="wrong",outcome="user_code_failed"}',
        'noria_user_code_seconds_count{endpoint="sync",method="postprocess"}',
    ]
    before = metrics(web, *names)
    post(web, "sync", texts=["a", "b", "c"])
    post(web, "wrong", how="raise")
    after = [0, 1, 3, 1, 1, 1]
    wait_until(lambda: [now - was for now, was in zip(metrics(web, *names), before, strict=True)] == after)


def test_changed_code_replaces_the_old_and_code_that_cannot_be_loaded_does_not(web, replaced_file, captured_log_fields):
    def replace(text):
        replaced_file.with_suffix(".new").write_text(text)
        replaced_file.with_suffix(".new").rename(replaced_file)

    with captured_log_fields("noria.user_code") as lines:
        np.testing.assert_allclose(post(web, "replaced").json(), [vector("one")], rtol=1e-6)
        replace("class Replaced:\n    def preprocess(self, body, state): return 'two'\n")
        wait_until(lambda: post(web, "replaced").json() == [pytest.approx(vector("two").tolist())])
        replace("class Replaced:\n    def preprocess(self, body): return 'three'\n")
        wait_until(lambda: len(lines()) == 2)
        assert post(web, "replaced").json() == [pytest.approx(vector("two").tolist())]
    assert [line["event"] for line in lines()] == ["user_code_loaded", "user_code_rejected"]


KEPT = """
import threading

class Replaced:
    began, may_end = threading.Event(), threading.Event()

    def preprocess(self, body, state):
        if body.get("waits"):
            self.began.set()
            self.may_end.wait(60)

    def postprocess(self, result, state):
        return NUMBER
"""


def test_replacing_code_under_load_fails_no_request_and_each_keeps_the_code_it_began_with(web, replaced_file):
    def replace(number):
        replaced_file.with_suffix(".new").write_text(KEPT.replace("NUMBER", str(number)))
        replaced_file.with_suffix(".new").rename(replaced_file)
        wait_until(lambda: post(web, "replaced").json() == number)

    def ask():
        while not done.is_set():
            answers.append(post(web, "replaced"))

    answers, done = [], threading.Event()
    replace(0)
    first = sys.modules["noria_endpoint_replaced"].Replaced
    with concurrent.futures.ThreadPoolExecutor(4) as users:
        waiting = users.submit(post, web, "replaced", waits=True)
        try:
            assert first.began.wait(60)
            asking = [users.submit(ask) for _ in range(3)]
            for number in range(1, 6):
                replace(number)
        finally:
            done.set()
            first.may_end.set()
        for each in asking:
            each.result()
    assert waiting.result().json() == 0
    assert {answer.status_code for answer in answers} == {200}
    assert [answer.json() for answer in answers if answer.json() == 5]
