"""Errors as responses: whole bodies and headers."""

import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from noria.errors import (
    CrossOriginRequest,
    EngineUnavailable,
    HostNotAllowed,
    InternalError,
    InvalidField,
    RateLimited,
    RequestCancelled,
    RouteNotFound,
    Unauthorized,
)
from noria.frontend.http.errors import (
    DEFAULT_ERRORS,
    error_body,
    error_response,
    hint_of,
    internal_error_response,
    routing_error_response,
)


def request(path="/", method="GET", **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    state = {"request_id": "r1"}
    return Request(
        {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b"", "state": state}
    )


@pytest.mark.parametrize(
    ("error", "kind", "param", "retryable"),
    [
        (InvalidField("no", field="n"), "invalid_request_error", "n", False),
        (Unauthorized("no"), "authentication_error", None, False),
        (RouteNotFound("no"), "not_found_error", None, False),
        (RateLimited("no", retry_after_s=1), "rate_limit_error", None, True),
        (RequestCancelled("no"), "cancelled_error", None, False),
        (InternalError("no"), "server_error", None, False),
        (EngineUnavailable("no", retry_after_s=1), "server_error", None, True),
    ],
)
def test_an_error_is_one_shape_with_the_type_of_openai(error, kind, param, retryable):
    assert msgspec.to_builtins(error_body(error, "r1")) == {
        "error": {
            "code": error.code, "message": "no", "type": kind, "param": param, "retryable": retryable,
            "request_id": "r1",
        }
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "header"), [(None, None), (0.0, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")])
def test_retry_after_is_in_whole_seconds_and_at_least_one(seconds, header):
    http = request()
    response = error_response(RateLimited("no", retry_after_s=seconds), http, DEFAULT_ERRORS, {"X-Other": "1"})
    assert (response.status_code, response.headers.get("retry-after"), response.headers["x-other"]) == (
        429,
        header,
        "1",
    )
    assert http.scope["state"] == {"request_id": "r1", "error_code": "rate_limited"}


def test_only_messages_without_prompts_are_logged():
    for error in (HostNotAllowed("why"), CrossOriginRequest("why")):
        http = request()
        error_response(error, http, DEFAULT_ERRORS)
        assert http.scope["state"]["logged_error"] == "why"


def test_a_missing_key_is_asked_for_twice_and_by_scripts_of_pages_once():
    bearer, basic = 'Bearer realm="noria"', 'Basic realm="noria", charset="UTF-8"'
    for headers, challenges in (({}, [bearer, basic]), ({"x_requested_with": "noria"}, [bearer])):
        response = error_response(Unauthorized("no"), request(**headers), DEFAULT_ERRORS)
        assert response.headers.getlist("www-authenticate") == challenges
    assert "www-authenticate" not in error_response(RouteNotFound("no"), request(), DEFAULT_ERRORS).headers


def test_a_wrong_method_is_answered_with_the_allowed_ones():
    error = HTTPException(405, headers={"Allow": "POST, GET"})
    preflight = routing_error_response(request("/t2i", "OPTIONS"), error, DEFAULT_ERRORS, [])
    assert (preflight.status_code, preflight.headers["allow"], preflight.body) == (204, "GET, POST, OPTIONS", b"")
    message = "PUT is not allowed for '/t2i'; allowed is GET, POST."
    response = routing_error_response(request("/t2i", "PUT"), error, DEFAULT_ERRORS, [])
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")
    assert msgspec.json.decode(response.body)["error"]["message"] == message
    for path, has_hint in (("/v1/models/a:predict", True), ("/v1/models/a", False), ("/t2i:predict", False)):
        response = routing_error_response(request(path, "PUT"), error, DEFAULT_ERRORS, [])
        assert (b"KServe" in response.body) is has_hint


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/xyz", "there is no '/xyz'. GET /docs lists the routes."),
        ("/t2", "there is no '/t2'. Did you mean '/t2i'? GET /docs lists the routes."),
        (
            "/api/tags/",
            "there is no '/api/tags/'. It is Ollama's; here GET /v1/models lists the models. GET /docs lists the "
            "routes.",
        ),
    ],
)
def test_an_unknown_path_is_answered_with_what_is_there(path, message):
    response = routing_error_response(request(path), HTTPException(404), DEFAULT_ERRORS, ["/t2i", "/v1/jobs"])
    assert (response.status_code, msgspec.json.decode(response.body)["error"]["message"]) == (404, message)


def test_paths_below_one_that_ends_in_a_slash_have_its_hint():
    assert hint_of("/v1/chat/completions") == hint_of("/v1/completions") != ""
    assert hint_of("/v1/completions/more") == hint_of("/v1/chats") == ""


def test_an_unexpected_exception_reveals_only_the_id_of_the_request():
    response = internal_error_response(request(), DEFAULT_ERRORS)
    detail = msgspec.json.decode(response.body)["error"]
    assert (response.status_code, detail["code"], detail["request_id"]) == (500, "internal", "r1")
    assert detail["message"] == "the server failed on this request; its log has the details under r1."
