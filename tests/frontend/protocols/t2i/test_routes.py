"""POST /t2i over real sockets: responses, and requests that are rejected before they reach an engine."""

import base64
import io
import json
import random
import re
import socket
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.responses import Response

from frontends import served_client
from noria.config import Config, FrontendConfig
from noria.errors import ImageFileError
from noria.frontend.http import body as bodies
from noria.frontend.services.images.generation_types import GenerationResult, ImageTask, ResponseTimings
from noria.frontend.services.images.request_validation import validate
from noria.images.metadata_io import read_metadata
from noria.protocol.request import ImageRequestBody
from waiting import wait_until


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"code", "message", "type", "param", "retryable", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return error


def test_one_image_is_the_file_itself(client, engine, spec):
    response = client.post("/t2i", json={"prompt": "a red bicycle", "seed": 5})
    assert response.status_code == 200
    assert response.headers["content-type"] == "image/png"
    assert response.headers["x-noria-seed"] == "5"
    assert response.headers["x-noria-model"] == "tiny"
    stages = re.fullmatch(
        r"queue;dur=1\.0, image_encode;dur=0\.0, text_encode;dur=2\.0, denoise;dur=3\.0, decode;dur=4\.0, "
        r"postprocess;dur=[\d.]+, predicted;dur=500\.0",
        response.headers["server-timing"],
    )
    assert stages
    image = Image.open(io.BytesIO(response.content))
    assert image.size == (spec.default_width_px, spec.default_height_px)
    assert image.getpixel((3, 3)) == engine.colour(5)


def test_defaults_are_those_of_the_model(client, engine, spec):
    client.post("/t2i", json={"prompt": "p", "width": 32})
    (request,) = engine.submitted
    assert (request.payload.width, request.payload.height) == (32, spec.default_height_px)
    assert (request.payload.inference_steps, request.payload.guidance_scale, request.payload.scheduler) == (
        12,
        6.5,
        "ddim",
    )
    assert (request.payload.n, request.payload.negative_prompt) == (1, None)
    assert 0 <= request.payload.seed < 2**32


def test_seeds_differ_also_if_code_of_an_endpoint_seeds_pythons_generator(client, engine):
    for _ in range(2):
        random.seed(7)
        client.post("/t2i", json={"prompt": "p", "width": 16, "height": 16})
    first, second = [request.payload.seed for request in engine.submitted]
    assert first != second


def test_several_images_come_as_json_in_order(client, engine):
    response = client.post("/t2i", json={"prompt": "p", "seed": 100, "n": 3, "width": 16, "height": 16})
    answer = response.json()
    assert answer["request_id"] == response.headers["x-request-id"]
    assert [(image["index"], image["seed"]) for image in answer["images"]] == [(0, 100), (1, 101), (2, 102)]
    for image in answer["images"]:
        file = Image.open(io.BytesIO(base64.b64decode(image["b64_json"])))
        assert file.getpixel((0, 0)) == engine.colour(image["seed"])
        assert (image["width"], image["height"], image["format"]) == (16, 16, "png")
    assert answer["timings"]["denoise_s"] == 0.003
    assert answer["model"] == "tiny"


@pytest.mark.parametrize(("num_words", "num_cut"), [(75, 0), (80, 5)])
def test_tokens_that_the_model_does_not_read_are_counted(client, num_words, num_cut):
    body = {"prompt": "w " * num_words}
    for path, options in (("/t2i", {}), ("/t2i", {"n": 2}), ("/v1/images/generations", {})):
        response = client.post(path, json=body | options)
        assert response.headers.get("x-noria-truncated-tokens") == (str(num_cut) if num_cut else None)
        if response.headers["content-type"] == "application/json":
            assert response.json()["num_truncated_tokens"] == num_cut
    for path, event in (("/t2i", "finished"), ("/v1/images/generations", "image_generation.completed")):
        *_, last = client.post(path, json=body | {"stream": True}).text.strip().split("\n\n")
        name, data = last.split("\n")
        assert name == f"event: {event}"
        assert json.loads(data.removeprefix("data: "))["num_truncated_tokens"] == num_cut


@pytest.mark.parametrize("accept", ["*/*", "application/json, text/plain, */*", "image/webp", ""])
def test_file_if_images_are_accepted(client, accept):
    response = client.post("/t2i", json={"prompt": "p"}, headers={"accept": accept})
    assert response.headers["content-type"] == "image/png"


def test_request_id_of_the_client_is_returned(client):
    assert (
        client.post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "mine-1.a_B"}).headers["x-request-id"]
        == "mine-1.a_B"
    )


@pytest.mark.parametrize("bad", ["a b", "é".encode(), "x" * 129, ""])
def test_invalid_request_id_is_replaced(client, bad):
    assert re.fullmatch(r"[0-9a-f]{32}", client.get("/healthz", headers={"x-request-id": bad}).headers["x-request-id"])


@pytest.mark.parametrize("accepted", ["Euler", "EulerDiscreteScheduler", "euler"])
def test_scheduler_by_any_of_its_names(client, engine, accepted):
    assert client.post("/t2i", json={"prompt": "p", "scheduler": accepted}).status_code == 200
    assert engine.submitted[0].payload.scheduler == "euler"


def test_an_integer_may_have_a_zero_fraction(client, engine):
    body = b'{"prompt": "p", "width": 32.0, "inference_steps": 2e1}'
    assert client.post("/t2i", content=body, headers={"content-type": "application/json"}).status_code == 200
    payload = engine.submitted[0].payload
    assert (payload.width, payload.inference_steps) == (32, 20)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt", 3, "a string"),
        ("prompt", "x" * 201, "201 characters; at most 200"),
        ("negative_prompt", "x" * 201, "at most 200"),
        ("seed", -1, "0 to 9223372036854775803"),
        ("seed", 10**40, "0 to"),
        ("seed", 1.5, "an integer or null"),
        ("seed", True, "an integer or null"),
        ("width", 60, "multiple of 8, such as 56 or 64"),
        ("height", 136, "16 to 128"),
        ("inference_steps", 0, "1 to 100"),
        ("inference_steps", {}, "an integer or null"),
        ("guidance_scale", -0.5, "0.0 to 50.0"),
        ("guidance_scale", "7", "a number or null"),
        ("n", 0, "1 to 4"),
        ("n", None, "an integer"),
        ("scheduler", "eule", "euler"),
        ("scheduler", "heun", "ddim, euler, pndm"),
        ("scheduler", 5, "a string or null"),
        ("format", "gif", '"png", "webp" or "jpeg"'),
        ("inference_step", 5, "Did you mean 'inference_steps'?"),
        ("x" * 1000, 5, "unknown field"),
    ],
)
def test_invalid_field_is_named_and_not_submitted(client, engine, field, value, says):
    response = client.post("/t2i", json={"prompt": "p"} | {field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("invalid_field", field[:80])
    assert (error["type"], error["retryable"]) == ("invalid_request_error", False)
    assert says in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"", "invalid_body", "is empty"),
        (b'{"seed": 1}', "invalid_field", "prompt is missing."),
        (b"{", "invalid_body", "not JSON"),
        (b'{"prompt": "p"} trailing', "invalid_body", "trailing"),
        (b'{"prompt": "p", "guidance_scale": NaN}', "invalid_body", "NaN and Infinity are no JSON numbers"),
        (b'{"prompt": "p", "guidance_scale": 1e999}', "invalid_field", "out of range"),
        (b'{"prompt": "\xff"}', "invalid_body", "utf-8"),
        (b'{"prompt": "\\ud800"}', "invalid_body", "not JSON"),
        (b"[]", "invalid_body", "not an object"),
        (b"[" * 4000, "invalid_body", "not an object"),
        (b'{"prompt": ' + b"[" * 4000, "invalid_field", "prompt"),
        (b'{"a": ' * 600, "invalid_field", "unknown field"),
        (b'{"prompt": "p", "seed": ' + b"9" * 4000 + b"}", "invalid_field", "seed"),
    ],
)
def test_invalid_body(client, engine, body, code, says):
    response = client.post("/t2i", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == code
    assert says in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(client, engine, chunked):
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    content = (body[start : start + 1000] for start in range(0, len(body), 1000)) if chunked else body
    response = client.post("/t2i", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert engine.submitted == []
    assert client.post("/t2i", json={"prompt": "p"}).status_code == 200


def test_too_large_body_is_rejected_before_it_is_sent(client, url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_body_that_does_not_arrive_times_out(client, url, monkeypatch):
    monkeypatch.setattr(bodies, "_TIMEOUT_S", 0.2)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close\r\n" in answer.lower()
    assert b"the body did not arrive within 0.2 s; 1 bytes of it did." in answer


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_wrong_content_type(client, engine, media_type):
    response = client.post("/t2i", content=b'{"prompt": "p"}', headers={"content-type": media_type})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    assert engine.submitted == []


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_type_with_parameters(client, media_type):
    assert client.post("/t2i", content=b'{"prompt": "p"}', headers={"content-type": media_type}).status_code == 200


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60) | st.text(alphabet='{}[]",:0eE+-.\\u d8prompt', max_size=60).map(str.encode))
def test_no_bytes_break_the_server(client, raw):
    response = client.post("/t2i", content=raw, headers={"content-type": "application/json"})
    assert response.status_code in {200, 400}


def test_engine_errors_keep_code_and_retry_after(client, engine):
    engine.failure = {"code": "queue_full", "message": "256 images are waiting.", "retry_after_s": 2.2}
    response = client.post("/t2i", json={"prompt": "p"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    error = error_of(response)
    assert (error["code"], error["retryable"], error["type"]) == ("queue_full", True, "rate_limit_error")


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations"])
@pytest.mark.parametrize("field", ["inference_steps", "n"])
def test_engine_error_of_a_field_names_it(client, engine, path, field):
    engine.failure = {"code": "invalid_field", "message": "never here", "field": field}
    response = client.post(path, json={"prompt": "p"})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"], error["retryable"]) == ("invalid_field", field, False)


@pytest.mark.parametrize(
    ("model", "header"),
    [("org/sd-1.5", "org/sd-1.5"), ("стиль é", "%D1%81%D1%82%D0%B8%D0%BB%D1%8C %C3%A9"), ("a\r\nb", "a%0D%0Ab")],
)
def test_any_model_name_fits_its_header(spec, model, header):
    spec = msgspec.structs.replace(spec, name=model)
    task = ImageTask(
        request=validate(ImageRequestBody("p"), spec, FrontendConfig(), "id", lambda: 0),
        spec=spec,
        file_format="png",
        quality=None,
        metadata=True,
        data=None,
    )
    result = GenerationResult(task, [], [], [], ResponseTimings(0, 0, 0, 0, 0, 0, 0, 0), 1, 1.0)
    assert Response(headers=result.headers).headers["x-noria-model"] == header


def test_unknown_engine_error_is_generation_failed(client, engine):
    engine.failure = {"code": "out_of_cheese", "message": "redo from start"}
    response = client.post("/t2i", json={"prompt": "p"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "generation_failed"


def test_same_request_id_at_the_same_time_is_two_requests(client, engine, url):
    engine.never_answers = True
    statuses = []

    def post():
        statuses.append(client.post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "twin"}).status_code)

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine.submitted) == 2)
    assert len({request.attempt_id for request in engine.submitted}) == 2
    assert all(request.request_id == "twin" for request in engine.submitted)
    engine.failure = {"code": "generation_failed", "message": "enough"}
    engine.never_answers = False
    engine.set_state("dead")
    engine.set_state("ready")
    for thread in threads:
        thread.join()
    assert statuses == [500, 500]


def test_request_that_crashes_the_engine_twice_fails(client, engine):
    engine.num_crashes_left = 2
    response = client.post("/t2i", json={"prompt": "p"})
    assert response.status_code == 500
    error = error_of(response)
    assert (error["code"], error["retryable"]) == ("engine_crashed", False)
    assert "nothing else in flight" in error["message"]
    assert len(engine.submitted) == 2


def test_engine_that_does_not_restart(new_engine):
    engine = new_engine()
    engine.num_crashes_left, engine.restarts = 1, False
    with served_client(Config(), engine, restart_wait_s=1.0) as client:
        response = client.post("/t2i", json={"prompt": "p"})
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_lost")
        response = client.post("/t2i", json={"prompt": "p"})
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        assert client.post("/t2i", json={"prompt": "p", "n": 0}).status_code == 400  # the model is still known
        not_ready = client.get("/readyz")
    assert not_ready.status_code == 503
    assert not_ready.json() == {"ready": False, "engines": [{"state": "unknown", "device": None, "incarnation": None}]}


@pytest.mark.parametrize("file_format", ["png", "webp", "jpeg"])
def test_files_have_no_metadata_if_disabled(client, tmp_path, file_format):
    answer = client.post("/t2i", json={"prompt": "a secret", "format": file_format, "metadata": False})
    assert answer.headers["content-type"] == f"image/{file_format}"
    assert Image.open(io.BytesIO(answer.content)).format == file_format.upper()
    (tmp_path / "image").write_bytes(answer.content)
    with pytest.raises(ImageFileError, match="has no generation metadata"):
        read_metadata(tmp_path / "image")
    assert b"secret" not in answer.content


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations"])
def test_one_refusal_names_all_fields_that_are_wrong(client, engine, path):
    size = {"width": 33} if path == "/t2i" else {"size": "33x64", "response_format": "url"}
    wrong = {"prompt": "x" * 5000, "steps": 4, "n": 99, "guidance_scale": "a", "scheduler": "foo", "deadline_ms": 0}
    answer = client.post(path, json=wrong | size)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_field")
    message = answer.json()["error"]["message"]
    says = ["guidance_scale is 'a'", "unknown field 'steps'", "n is 99", "width is 33", "'foo'", "deadline_ms is 0"]
    says += ["prompt has 5000 characters"] + ["response_format"] * (path != "/t2i")
    for name in says:
        assert name in message
    assert engine.submitted == []


def test_many_unknown_fields_are_named_in_part(client):
    answer = client.post("/t2i", json={"prompt": "p", **{f"field_{k}": k for k in range(300)}})
    assert "unknown fields 'field_0', 'field_1'" in answer.json()["error"]["message"]
    assert "and others. Known are: prompt" in answer.json()["error"]["message"]
    assert len(answer.json()["error"]["message"]) < 1000
