"""Web pages that make their reader's browser send requests: DNS rebinding, and requests across origins."""

import logging
import socket

import httpx
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.frontend.access.request_origin import check_hosts
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until, wait_until_ready

PROBES = [each.path for each in build_app(Config(), EnginePool([])).state.operations if each.is_probe]
INTERRUPT = "/sdapi/v1/interrupt"  # needs no body, so any page could send it


@pytest.fixture(scope="module")
def client(tmp_path_factory, folder):
    config = Config(frontend=FrontendConfig(allowed_hosts=("images.example", "*.proxy.example")))
    with (
        FakeEngine(f"ipc://{folder}/origins") as engine,
        serving(config, engine) as (url, _),
        httpx.Client(base_url=url, timeout=60, verify=False) as opened,
    ):
        wait_until_ready(url)
        yield opened


def code_of(response):
    return response.json()["error"]["code"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "noria.localhost:8000",
        "127.0.0.1:8000",
        "192.0.2.7",
        "[::1]:8000",
        "images.example",
        "Images.Example:443",
        "a.b.proxy.example",
    ],
)
def test_names_of_the_server_and_addresses_are_served(client, host):
    assert client.get("/v1/jobs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:8000",
        "images.example.attacker.example",
        "proxy.example.attacker.example",
        "notproxy.example",
        "proxy.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "localhost@attacker.example",
        "[::1].attacker.example",
        "",
        "[::1",
        "localhost:x",
        "é.example",
    ],
)
def test_a_page_of_another_name_reads_nothing(client, host):
    for path in ("/v1/jobs", "/metrics", "/", "/nothing"):
        response = client.get(path, headers={"host": host.encode("latin-1")})
        assert (response.status_code, code_of(response)) == (421, "host_not_allowed")


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "attacker.example"]])
def test_a_request_has_one_host(client, hosts):
    fields = "".join(f"Host: {host}\r\n" for host in hosts)
    with socket.create_connection((client.base_url.host, client.base_url.port), 60) as raw:
        raw.sendall(f"GET /healthz HTTP/1.1\r\n{fields}Connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and f"{len(hosts)} Host headers".encode() in answer


def first_line(client, request):
    with socket.create_connection((client.base_url.host, client.base_url.port), 60) as raw:
        raw.sendall(request.encode())
        return b"".join(iter(lambda: raw.recv(65536), b"")).partition(b"\r\n")[0].decode()


@pytest.mark.parametrize("path", sorted(PROBES))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_of_http_1_0_need_no_host(client, method, path):
    assert first_line(client, f"{method} {path} HTTP/1.0\r\n\r\n") == "HTTP/1.1 200 OK"
    assert first_line(client, f"{method} {path} HTTP/1.0\r\nHost: images.example\r\n\r\n") == "HTTP/1.1 200 OK"
    assert " 421 " in first_line(client, f"{method} {path} HTTP/1.0\r\nHost: attacker.example\r\n\r\n")
    rejected = 422 if path == "/health" else 400  # as text-embeddings-inference says it
    assert f" {rejected} " in first_line(client, f"{method} {path} HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert f" {rejected} " in first_line(client, f"{method} {path} HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize(
    "request_line", ["GET /v1/jobs", "GET /metrics", "GET /", f"POST {INTERRUPT}", "POST /healthz"]
)
def test_other_requests_of_http_1_0_need_one(client, request_line):
    assert " 400 " in first_line(client, f"{request_line} HTTP/1.0\r\n\r\n")


def test_haproxys_default_check_is_answered(client):
    assert first_line(client, "OPTIONS / HTTP/1.0\r\n\r\n") == "HTTP/1.1 204 No Content"


def access_line(caplog):
    """The fields of the one line of the access log."""

    def lines():
        return [record.noria_fields for record in list(caplog.records) if record.name == "noria.access"]

    wait_until(lines)
    (line,) = lines()
    return dict(line)


def test_a_preflight_is_refused_with_the_reason_and_logged_so(client, caplog):
    caplog.set_level(logging.INFO, "noria.access")
    preflight = {"origin": "https://shop.example", "access-control-request-method": "POST"}
    answer = client.options("/t2i", headers={"host": "localhost:8000"} | preflight)
    assert (answer.status_code, code_of(answer)) == (403, "cross_origin")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "Origin is 'https://shop.example': a web page of another origin sends this preflight (CORS)." in answer.text
    line = access_line(caplog)
    assert (line["status"], line["outcome"]) == (403, "cross_origin")
    assert "https://shop.example" in line["error"]


def test_a_name_that_is_not_allowed_is_in_the_log(client, caplog):
    caplog.set_level(logging.INFO, "noria.access")
    client.get("/v1/jobs", headers={"host": "attacker.example" + "x" * 3000})
    line = access_line(caplog)
    assert line["status"] == 421
    assert "Host is 'attacker.example" in line["error"]
    assert len(line["error"]) < 500


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost:8000"},
        {"origin": "https://attacker.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost"},
        {"origin": "null"},
        {"origin": ""},
    ],
)
def test_a_page_of_another_origin_changes_nothing(client, headers):
    headers = {"host": "localhost:8000"} | headers
    response = client.post(INTERRUPT, headers=headers)
    assert (response.status_code, code_of(response)) == (403, "cross_origin")
    assert client.delete("/v1/jobs/1", headers=headers).status_code == 403
    assert client.get("/v1/jobs", headers=headers).status_code == 200  # a page cannot read it


@pytest.mark.parametrize(
    "headers",
    [
        {},  # no browser
        {"sec-fetch-site": "same-origin", "origin": "https://behind-a-proxy.example"},
        {"sec-fetch-site": "none"},
        {"origin": "http://localhost:8000"},
        {"origin": "https://images.example"},  # a proxy replaced the Host
    ],
)
def test_the_servers_own_pages_and_other_clients_are_served(client, headers):
    assert client.post(INTERRUPT, headers={"host": "localhost:8000"} | headers).status_code == 200


def test_any_name_may_be_allowed_but_no_other_origin(serve, new_engine):
    config = Config(frontend=FrontendConfig(allowed_hosts=("*",)))
    with serve(config, new_engine()) as (url, _), httpx.Client(base_url=url, verify=False, timeout=60) as client:
        assert client.get("/healthz", headers={"host": "any.example"}).status_code == 200
        assert client.post(INTERRUPT, headers={"host": "any.example"}).status_code == 200
        headers = {"host": "any.example", "origin": "https://attacker.example"}
        assert client.post(INTERRUPT, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "host", ["https://images.example", "images.example:443", "images.example/", "", "*.", "a.*.example"]
)
def test_an_allowed_host_is_only_a_name(host):
    with pytest.raises(ConfigError, match=r"allowed_hosts.*Allowed are names"):
        check_hosts([host])


def test_json_is_never_taken_for_a_page(client):
    for path in ("/v1/jobs", "/nothing", "/docs"):
        assert client.get(path).headers.get_list("x-content-type-options") == ["nosniff"]
