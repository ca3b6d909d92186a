"""A front end on a Unix socket: who its clients are, without an address."""

import logging

import httpx
import pytest

from noria.config import Config, FrontendConfig
from waiting import wait_until


@pytest.mark.parametrize(
    ("options", "headers", "client"),
    [
        ({}, {}, "unix"),
        ({}, {"X-Forwarded-For": "192.0.2.1, 203.0.113.9"}, "203.0.113.9"),
        ({}, {"X-Forwarded-For": "unix, 203.0.113.9"}, "203.0.113.9"),  # the first one is what the client says
        ({"trusted_proxies": ("127.0.0.1",)}, {"X-Forwarded-For": "203.0.113.9"}, "unix"),
    ],
)
def test_a_client_is_named_by_the_proxy_if_it_is_trusted(
    options, headers, client, serve, new_engine, folder, captured_log_fields
):
    path = folder / "noria.sock"
    config = Config(frontend=FrontendConfig(uds=str(path), **options))
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        serve(config, new_engine()) as (url, _),
        httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http,
        captured_log_fields("noria.access", logging.DEBUG) as logged,
    ):
        assert url == f"unix:{path}"
        assert http.get("/healthz", headers=headers).status_code == 200
        (line,) = wait_until(logged)  # it is written after the response
        assert line["client"] == client
        assert http.get("/healthz", headers={"Host": "rebound.example"}).status_code == 421
    assert not path.exists()
