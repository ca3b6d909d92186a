"""Known paths and methods, and the responses to others."""

import re

import pytest

from noria.frontend.http.errors import HINTS
from waiting import wait_until


def test_unknown_path_gets_the_nearest_path_as_a_hint(client):
    assert "Did you mean '/t2i'?" in client.get("/t2j").json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", "language models"),
        ("/v1/responses", "language models"),
        ("/api/generate", "language models"),
        ("/api/embed", "POST /v1/embeddings"),
        ("/embeddings", "base URL ends in /v1"),
        ("/v1/predictions", "POST /v1/jobs"),
        ("/prompt", "POST /t2i"),
        ("/txt2img/", "POST /sdapi/v1/txt2img"),
        ("/ping", "/readyz"),
    ],
)
def test_clients_of_other_servers_are_told_the_route_here(client, path, told):
    response = client.post(path, json={})
    assert (response.status_code, told in response.text, "Did you mean" in response.text) == (404, True, False)


def test_every_route_that_clients_of_other_servers_are_told_exists(client):
    named = {route for hint in HINTS.values() for route in re.findall(r"(?:GET|POST) (/[\w/]+)", hint)}
    assert named <= client.get("/openapi.json").json()["paths"].keys()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/t2i", "POST"),
        ("DELETE", "/t2i", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/", "GET, HEAD, POST"),
    ],
)
def test_wrong_method(client, method, path, allow):
    response = client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allow)
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_a_client_of_kserves_first_protocol_is_told_the_second(client):
    response = client.post("/v1/models/minilm:predict", json={"instances": ["a"]})
    assert (response.status_code, "POST /v2/models/NAME/infer" in response.json()["error"]["message"]) == (405, True)


@pytest.mark.parametrize(("path", "allow"), [("/t2i", "POST, OPTIONS"), ("/", "GET, HEAD, POST, OPTIONS")])
def test_options_returns_the_methods_of_a_path(client, path, allow):
    answer = client.options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allow, b"")


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_what_is_polled_is_logged_for_debugging_whatever_its_method(client, captured_log_fields, method):
    """Load balancers ask with OPTIONS, too."""
    with captured_log_fields("noria.access") as lines:
        for path in ("/healthz", "/v2/health/ready", "/pages/shared/style.css"):
            client.request(method, path)
        client.request("OPTIONS", "/v1/models")
        wait_until(lambda: [line for line in lines() if line["path"] == "/v1/models"])
    assert [line["path"] for line in lines()] == ["/v1/models"]


@pytest.mark.parametrize("path", ["/t2i/", "/v1/models/tiny/", "/v2/models/tiny/", "/v1/jobs/job_1/", "/nothing"])
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "HEAD", "POST"])
def test_every_method_finds_the_same_paths(client, method, path):
    assert client.request(method, path).status_code == 404
