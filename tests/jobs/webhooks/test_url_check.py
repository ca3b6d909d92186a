"""URLs that a webhook may have: tables of attacks."""

import asyncio
import contextlib

import pytest

from noria.errors import InvalidField
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.url_check import check_webhook_url, is_public

PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::8.8.8.8"]
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.9.10",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",  # carrier-grade NAT
    "169.254.169.254",  # metadata services of clouds
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:7f00:1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::10.0.0.1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2002:a00:1::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",  # Teredo of 127.0.0.1
    "2001:db8::1",
    "100::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "localhost",
    "",
]


def test_only_a_public_address_is_public():
    assert [address for address in PUBLIC if not is_public(address)] == []
    assert [address for address in NOT_PUBLIC if is_public(address)] == []


def resolve_target(url, *addresses, allow_private=False):
    """The target of `url` where its host resolves to `answer`, which is asked for once."""
    asked = []

    async def resolve(host, port):
        asked.append((host, port))
        return list(addresses)

    target = asyncio.run(check_webhook_url(url, resolve, allow_private=allow_private))
    assert len(asked) == 1
    return target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/hook",
        "//example.com/hook",
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com:70/_",
        "javascript:alert(1)",
        "unix:///var/run/docker.sock",
        "http://",
        "http:///hook",
        "http://:80/",
        "https://user@example.com/",
        "https://user:secret@example.com/",
        "https://example.com@127.0.0.1/",
        "https://@example.com/",
        "https://example.com:0/",
        "https://example.com:65536/",
        "https://example.com:-1/",
        "https://example.com:port/",
        "https://exa mple.com/",
        "https://example.com/a b",
        "https://example.com\\@127.0.0.1/",
        "https:\\\\example.com/",
        "https://example.com/\r\nHost: other",
        "https://example.com/\thook",
        "https://example.com/\x00",
        "https://exämple.com/",
        "https://example.com/ü",
        "https://example.com/\u202e",
        "https://%31%32%37.0.0.1/",
        "https://[fe80::1%25eth0]/",
        "https://[::1/",
        "https://[not-an-address]/",
        "https://a<b>.example/",
        "https://example.com/" + "a" * 2048,
    ],
)
def test_malformed_and_non_http_urls_are_rejected_without_a_lookup(url):
    async def resolve(host, port):
        raise AssertionError(f"asked for {host}:{port}")

    with pytest.raises(InvalidField) as caught:
        asyncio.run(check_webhook_url(url, resolve, allow_private=True))
    assert caught.value.field == "webhook"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://[::1]/",
    ],
)
def test_every_notation_of_loopback_is_rejected(url):
    """The system's own resolver reads all of them; what it says is what counts."""
    with contextlib.closing(Resolver()) as resolver, pytest.raises(InvalidField, match=r"not public|no address"):
        asyncio.run(check_webhook_url(url, resolver))


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["2606:2800:220:1::1", "::1"], []])
def test_one_private_address_among_several_rejects_the_host(answer):
    with pytest.raises(InvalidField) as caught:
        resolve_target("https://hooks.example/", *answer)
    assert not any(address in caught.value.message for address in answer)  # our network's names stay ours


def test_a_host_without_an_address_is_rejected():
    async def resolve(host, port):
        raise OSError("Name or service not known")

    with pytest.raises(InvalidField, match=r"has no address \(Name or service not known\)"):
        asyncio.run(check_webhook_url("https://nowhere.invalid/", resolve))


def test_a_target_has_the_checked_address_and_the_original_host_name():
    target = resolve_target("https://hooks.example/a/b?c=d#e", "8.8.8.8", "9.9.9.9")
    assert (target.url, target.host_header, target.host) == (
        "https://8.8.8.8:443/a/b?c=d",
        "hooks.example",
        "hooks.example",
    )
    target = resolve_target("http://Hooks.Example:8080", "2606:2800:220:1::1")
    assert (target.url, target.host_header) == ("http://[2606:2800:220:1::1]:8080/", "hooks.example:8080")
    target = resolve_target("http://[2606:2800:220:1::1]/x", "2606:2800:220:1::1")
    assert (target.url, target.host_header) == ("http://[2606:2800:220:1::1]:80/x", "[2606:2800:220:1::1]")


def test_the_operator_can_allow_private_addresses():
    assert resolve_target("http://hooks.internal/", "10.0.0.1", allow_private=True).address == "10.0.0.1"
