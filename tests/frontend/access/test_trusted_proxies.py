"""Trusted proxies are the same for the limits of connections and for X-Forwarded-For, in either form of IPv4."""

import logging

import httpx
import pytest

from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.frontend.access.trusted_proxies import check_proxies, in_both_forms, proxy_check
from waiting import wait_until


@pytest.mark.parametrize(
    ("host", "is_proxy"),
    [
        ("127.0.0.1", True),
        ("::ffff:127.0.0.1", True),
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.1.2.3", False),
        ("::ffff:11.1.2.3", False),
        ("192.0.2.9", True),
        ("192.0.3.9", False),
        ("2001:db8::1", True),
        ("unix", True),
        ("x", False),
    ],
)
def test_trusted_proxies_are_known_by_address_and_network(host, is_proxy):
    proxies = ["127.0.0.1", "10.0.0.0/8", "::ffff:192.0.2.0/120", "2001:db8::/32", "unix"]
    check_proxies(proxies)
    assert proxy_check(in_both_forms(proxies))(host) is is_proxy


@pytest.mark.parametrize("proxy", ["proxy.example", "10.0.0.1/8", "unix:"])
def test_a_proxy_that_is_neither_an_address_nor_a_network_is_rejected(proxy):
    with pytest.raises(ConfigError, match=f"trusted_proxies has '{proxy}': .* and unix"):
        check_proxies(["unix", proxy])


@pytest.mark.parametrize("proxy", ["127.0.0.0/8", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "::"])
def test_a_proxy_may_be_given_in_either_form(proxy, listens_on, serve, new_engine, captured_log_fields):
    config = Config(frontend=FrontendConfig(host=listens_on, trusted_proxies=(proxy,)))
    with serve(config, new_engine()) as (url, _), captured_log_fields("noria.access", logging.DEBUG) as logged:
        address = f"http://127.0.0.1:{httpx.URL(url).port}"
        headers = {"X-Forwarded-For": "203.0.113.9, ::ffff:127.0.0.1"}
        assert httpx.get(f"{address}/healthz", headers=headers, timeout=60).status_code == 200
        (line,) = wait_until(logged)
        assert line["client"] == "203.0.113.9"
