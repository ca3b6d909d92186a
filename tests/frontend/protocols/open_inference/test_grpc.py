"""The Open Inference Protocol over gRPC, in front of a fake engine, with our own descriptors."""

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import msgspec
import numpy as np
import pytest

from certificates import make_certificate
from frontends import serving
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError, MissingExtra
from noria.frontend.access.api_keys import generate_key
from noria.frontend.protocols.open_inference.grpc_messages import HEALTH_SERVICE, NOT_SERVING, SERVICE, SERVING, message
from noria.observe.metrics import declarations
from noria.protocol.routes import Route, Routes, Target
from noria.supervisor.listener import open_listeners
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id
from noria.testing.fake_engine import FakeEngine
from noria.testing.server import reserve_port
from noria_bench.soak.grpc_attacks import open_calls
from waiting import wait_until, wait_until_ready


def call(channel, method, fields=None, *, raw=None, timeout=60, metadata=(), service=SERVICE):
    """Return the response to a message, which is given by its fields or as bytes, and the call."""
    request = message(f"{method}Request")(**(fields or {})).SerializeToString() if raw is None else raw
    content, done = channel.unary_unary(f"/{service}/{method}").with_call(request, timeout=timeout, metadata=metadata)
    return message(f"{method}Response").FromString(content), done


def infer(channel, *texts, raw=False, fields=None, shape=None, parameters=None, **options):
    request = message("ModelInferRequest")(model_name="fake-encoder", **(fields or {}))
    tensor = request.inputs.add(name="TEXT", datatype="BYTES", shape=shape or [len(texts)])
    for name, value in (parameters or {}).items():
        tensor.parameters[name].CopyFrom(message("InferParameter")(**value))
    encoded = [each.encode() if isinstance(each, str) else each for each in texts]
    if raw:
        request.raw_input_contents.append(b"".join(len(each).to_bytes(4, "little") + each for each in encoded))
    else:
        tensor.contents.bytes_contents.extend(encoded)
    return call(channel, "ModelInfer", raw=request.SerializeToString(), **options)[0]


@pytest.fixture(scope="module")
def engine_of_texts(folder):
    with FakeEngine(f"ipc://{folder}/grpc", models=(FAKE_ENCODER,)) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine_of_texts):
    """The URL of a front end, a channel to it, the engine behind it, and gRPC's port."""
    with reserve_port() as port:
        config = Config(frontend=FrontendConfig(grpc_port=port, max_texts=8, max_body_bytes=4096))
        with serving(config, engine_of_texts) as (url, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            wait_until_ready(url)
            yield url, channel, engine_of_texts, port


@pytest.fixture
def channel(served):
    served[2].reset()
    return served[1]


def rejected(status, says, make):
    with pytest.raises(grpc.RpcError) as raised:
        make()
    assert raised.value.code() == getattr(grpc.StatusCode, status)
    assert says in raised.value.details()
    return raised.value


def test_health_metadata_config_statistics_and_index(channel):
    for method, field in (("ServerLive", "live"), ("ServerReady", "ready")):
        assert getattr(call(channel, method)[0], field)
    assert call(channel, "ModelReady", {"name": "fake-encoder", "version": "1"})[0].ready
    assert call(channel, "ServerMetadata")[0].name == "noria"
    metadata = call(channel, "ModelMetadata", {"name": "fake-encoder"})[0]
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.outputs] == [
        ("embedding", "FP32", [-1, 8])
    ]
    config = call(channel, "ModelConfig", {"name": "fake-encoder"})[0].config
    assert (config.max_batch_size, config.input[0].data_type, config.input[0].optional) == (8, 13, True)
    assert config.parameters["fingerprint"].string_value == FAKE_ENCODER.fingerprint
    (of_model,) = call(channel, "ModelStatistics", {"name": "fake-encoder"})[0].model_stats
    infer(channel, "a", "b")
    declarations.TEXT_BATCHES.labels("fake-encoder", "3").inc()  # as an engine in this process
    declarations.TEXT_BATCH_SECONDS.labels("fake-encoder", "3").inc(0.5)
    (later,) = call(channel, "ModelStatistics")[0].model_stats
    assert later.inference_count - of_model.inference_count == 2
    assert later.inference_stats.compute_infer.count == later.inference_stats.success.count > 0
    before, after = (
        {each.batch_size: each.compute_infer.ns for each in stats.batch_stats} for stats in (of_model, later)
    )
    assert after[3] - before.get(3, 0) == 500_000_000
    (model,) = call(channel, "RepositoryIndex", {"ready": True})[0].models
    assert (model.name, model.version, model.state) == ("fake-encoder", "1", "READY")


def test_grpcs_own_health_check_says_whether_the_server_is_ready(channel, served):
    def status():
        return call(channel, "Check", {"service": ""}, service=HEALTH_SERVICE)[0].status

    assert status() == SERVING
    served[2].set_state("loading")
    wait_until(lambda: status() == NOT_SERVING)
    served[2].set_state("ready")
    wait_until(lambda: status() == SERVING)


@pytest.mark.parametrize("raw", [False, True])
def test_embeddings_are_those_of_openais_api(served, channel, raw):
    of_openai = httpx.post(f"{served[0]}/v1/embeddings", json={"input": ["a cat", "größe"]}).json()["data"]
    answer = infer(channel, "a cat", "größe", raw=raw, fields={"id": "abc"})
    assert (answer.model_name, answer.model_version, answer.id) == ("fake-encoder", "1", "abc")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [2, 8])
    got = np.frombuffer(answer.raw_output_contents[0], "<f4") if raw else np.float32(output.contents.fp32_contents)
    np.testing.assert_array_equal(got.reshape(2, 8), np.float32([each["embedding"] for each in of_openai]))


@pytest.mark.parametrize("raw", [False, True])
def test_tokens(channel, raw):
    request = message("ModelInferRequest")(model_name="fake-encoder")
    for name, rows in (("input_ids", [[1, 50, 2, 0]]), ("attention_mask", [[1, 1, 1, 0]])):
        tensor = request.inputs.add(name=name, datatype="INT64", shape=[1, 4])
        if raw:
            request.raw_input_contents.append(np.array(rows, "<i8").tobytes())
        else:
            tensor.contents.int64_contents.extend(rows[0])
    answer = call(channel, "ModelInfer", raw=request.SerializeToString())[0]
    got = answer.raw_output_contents[0] if raw else np.float32(answer.outputs[0].contents.fp32_contents).tobytes()
    assert got == fake_vector([1, 50, 2]).tobytes()


def test_parameters_metadata_and_request_id(served, channel):
    parameters = {"timeout": {"int64_param": 5_000_000}, "normalize": {"bool_param": False}}
    metadata = (("x-noria-priority", "low"), ("x-request-id", "abc"))
    request = message("ModelInferRequest")(model_name="noria", parameters=parameters)
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    _, done = call(channel, "ModelInfer", raw=request.SerializeToString(), metadata=metadata)
    trailing = dict(done.trailing_metadata())
    assert (trailing["x-request-id"], trailing["x-noria-model"]) == ("abc", FAKE_ENCODER.name)
    assert "x-noria-truncated" not in trailing
    (submitted,) = served[2].submitted
    assert (submitted.request_id, submitted.priority, submitted.payload.normalize) == ("abc", "low", False)
    assert 4.0 < submitted.deadline_s < 5.0


def test_a_text_that_was_cut_is_said_in_the_trailing_metadata(channel):
    request = message("ModelInferRequest")(model_name="noria")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a " * 100, b"a"])
    _, done = call(channel, "ModelInfer", raw=request.SerializeToString())
    assert dict(done.trailing_metadata())["x-noria-truncated"] == "1"


def test_calls_choose_versions_and_say_which_answered_as_over_http(folder):
    canary = msgspec.structs.replace(FAKE_ENCODER, fingerprint="bbbbbbbbbbbb")
    control, other = (
        Target(number, f"words@{number}", f"sha256:{number}", spec.fingerprint, ())
        for number, spec in ((1, FAKE_ENCODER), (2, canary))
    )
    routes = Routes(1, (Route("fake-encoder", control, other, canary_share=0.5),))
    with reserve_port() as port, FakeEngine(f"ipc://{folder}/grpc-versions", models=(FAKE_ENCODER, canary)) as engine:
        config = Config(frontend=FrontendConfig(grpc_port=port, sticky_header="X-User"))
        with serving(config, engine, routes=routes) as (url, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            wait_until_ready(url)

            def version(metadata=(), text="a"):
                request = message("ModelInferRequest")(model_name="fake-encoder")
                request.inputs.add(name="TEXT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
                    text.encode()
                )
                _, done = call(channel, "ModelInfer", raw=request.SerializeToString(), metadata=metadata)
                return version_in(done)

            def version_in(done):
                trailing = dict(done.trailing_metadata())
                return trailing["x-noria-model-version"], trailing["x-noria-deployment"]

            assert {version() for _ in range(40)} == {("words@1", "1"), ("words@2", "2")}
            for user in ("ann", "bob", "eve"):
                assert len({version([("x-user", user)]) for _ in range(8)}) == 1
            tester = [("x-noria-version", "canary")]
            assert {version(tester) for _ in range(8)} == {("words@2", "2")}
            assert version_in(rejected("INVALID_ARGUMENT", "is empty", lambda: version(tester, ""))) == ("words@2", "2")
            elsewhere = [*tester, ("x-forwarded-for", "203.0.113.9")]
            rejected("UNAUTHENTICATED", "only clients on its own machine", lambda: version(elsewhere))
            rejected("INVALID_ARGUMENT", "words@1", lambda: version([("x-noria-version", "words@7")]))


def test_bad_requests_have_status_and_reason(channel):
    for status, says, make in (
        ("INVALID_ARGUMENT", "text 0 is empty", lambda: infer(channel, "")),
        ("INVALID_ARGUMENT", "element 0 is not UTF-8", lambda: infer(channel, b"\xff")),
        ("INVALID_ARGUMENT", "end within element 0", lambda: call(channel, "ModelInfer", raw=_malformed())),
        ("INVALID_ARGUMENT", "the message is no inference.ModelInferRequest", lambda: call(channel, "ModelInfer", raw=b"\xff\xff")),
        ("INVALID_ARGUMENT", "raw_input_contents has 2 elements", lambda: infer(channel, "a", raw=True, fields={"raw_input_contents": [b""]})),
        ("INVALID_ARGUMENT", "neither shared memory", lambda: infer(channel, "a", parameters={"shared_memory_region": {"string_param": "x"}})),
        ("NOT_FOUND", "model 'other' is not served here", lambda: call(channel, "ModelReady", {"name": "other"})),
        ("NOT_FOUND", "its one version is '1'", lambda: call(channel, "ModelConfig", {"name": "fake-encoder", "version": "2"})),
        ("UNIMPLEMENTED", "models are loaded by noria serve", lambda: call(channel, "RepositoryModelLoad")),
        ("RESOURCE_EXHAUSTED", "4096", lambda: infer(channel, "a" * 5000)),
    ):  # fmt: skip
        rejected(status, says, make)


def _malformed():
    request = message("ModelInferRequest")(model_name="fake-encoder", raw_input_contents=[b"\5\0\0\0a"])
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1])
    return request.SerializeToString()


def test_an_engines_error_says_when_to_retry(served, channel):
    served[2].failure = {"code": "queue_full", "message": "full", "retry_after_s": 2.5}
    error = rejected("RESOURCE_EXHAUSTED", "full", lambda: infer(channel, "a"))
    assert ("retry-after", "3") in [tuple(each) for each in error.trailing_metadata()]


def test_a_deadline_and_a_cancellation_of_the_call_cancel_the_request(served, channel):
    engine = served[2]
    engine.never_answers = True
    rejected("DEADLINE_EXCEEDED", "", lambda: infer(channel, "a", timeout=0.5))
    wait_until(lambda: engine.cancelled)
    assert 0 < engine.submitted[0].deadline_s <= 0.5
    request = message("ModelInferRequest")(model_name="fake-encoder")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    future = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(request.SerializeToString())
    wait_until(lambda: len(engine.submitted) == 2)
    future.cancel()
    wait_until(lambda: len(engine.cancelled) == 2)


@pytest.mark.parametrize(
    "linger_s", [pytest.param(None, id="ended, as of a killed client"), pytest.param(0, id="reset, as by a proxy")]
)
def test_a_connection_that_is_lost_cancels_all_its_requests(served, channel, linger_s):
    engine, port = served[2:]
    engine.never_answers = True
    request = message("ModelInferRequest")(model_name="fake-encoder")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        open_calls(connection, "ModelInfer", 3, body=request.SerializeToString())
        wait_until(lambda: len(engine.submitted) == 3)
        assert not engine.cancelled
        if linger_s is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger_s))
    wait_until(lambda: len(engine.cancelled) == 3, 10)
    assert sorted(engine.cancelled) == sorted(each.attempt_id for each in engine.submitted)
    engine.never_answers = False
    assert infer(channel, "a").outputs


def test_one_line_and_metrics_for_each_call(served, channel, captured_log_fields):
    with captured_log_fields("noria.requests") as lines:
        infer(channel, "a cat")
        wait_until(lines)
    (line,) = lines()
    assert (line["path"], line["status"], line["client"]) == (f"/{SERVICE}/ModelInfer", 200, "127.0.0.1")
    assert (line["outcome"], line["model"], line["num_tokens"]) == ("ok", "fake-encoder", 4)
    metrics = httpx.get(f"{served[0]}/metrics").text
    assert f'noria_http_requests_total{{method="POST",path="/{SERVICE}/ModelInfer",status="200"}}' in metrics


def test_keys_tls_and_drain(engine_of_texts, tmp_path):
    """Use one server for all three: a call in flight is finished, although the server accepts no more."""
    certificate = make_certificate(tmp_path)
    key, table = generate_key("alice")
    (tmp_path / "keys.toml").write_text(table)
    engine_of_texts.reset()
    with reserve_port() as port:
        frontend = FrontendConfig(
            grpc_port=port,
            api_keys_file=str(tmp_path / "keys.toml"),
            ssl_certfile=str(certificate.certfile),
            ssl_keyfile=str(certificate.keyfile),
        )
        credentials = grpc.ssl_channel_credentials(certificate.certfile.read_bytes())
        with (
            serving(Config(frontend=frontend), engine_of_texts) as (_, server),
            grpc.secure_channel(f"localhost:{port}", credentials) as channel,
        ):
            grpc.channel_ready_future(channel).result(60)
            wait_until(lambda: call(channel, "ServerReady")[0].ready)
            rejected("UNAUTHENTICATED", "needs an API key", lambda: infer(channel, "a"))
            bearer = (("authorization", f"Bearer {key}"),)
            engine_of_texts.never_answers = True
            answers = []
            thread = threading.Thread(target=lambda: answers.append(infer(channel, "a cat", metadata=bearer)))
            thread.start()
            wait_until(lambda: engine_of_texts.submitted)
            server.should_exit = True
            wait_until(lambda: _is_refused(channel))
            engine_of_texts.never_answers = False
            engine_of_texts.set_state("dead")
            engine_of_texts.set_state("ready")
            thread.join()
    got = np.float32(answers[0].outputs[0].contents.fp32_contents)
    np.testing.assert_array_equal(got, fake_vector([1, word_id("a"), word_id("cat"), 2]))


def test_a_call_in_flight_at_the_end_of_a_drain_is_told_that_the_server_stops(engine_of_texts):
    engine_of_texts.reset()
    engine_of_texts.never_answers = True
    with reserve_port() as port, ThreadPoolExecutor(1) as thread:
        config = Config(frontend=FrontendConfig(grpc_port=port, drain_s=0.3))
        with serving(config, engine_of_texts) as (_, server), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(60)
            wait_until(lambda: call(channel, "ServerReady")[0].ready)
            calling = thread.submit(rejected, "UNAVAILABLE", "the server is stopping", lambda: infer(channel, "a"))
            wait_until(lambda: engine_of_texts.submitted)
            server.should_exit = True
            calling.result(60)
    engine_of_texts.never_answers = False


def _is_refused(channel):
    try:
        call(channel, "ServerLive", timeout=5)
    except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.UNAVAILABLE
    return False


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("noria.extras.importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"noria-serve\[grpc\]"):
        open_listeners(FrontendConfig(port=0, grpc_port=1)).__enter__()


def test_a_port_that_another_server_has_is_an_error_before_anything_starts():
    with reserve_port() as port:
        config = FrontendConfig(port=0, grpc_port=port)
        with (
            open_listeners(config),
            pytest.raises(ConfigError, match=rf"grpc_port\): port {port} on 127.0.0.1 is taken"),
        ):
            open_listeners(config).__enter__()
