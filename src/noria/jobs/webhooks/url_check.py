"""Checks webhook URLs against server-side request forgery: clients choose them, this server may reach internal hosts.

A URL is checked when its job is accepted and again before each delivery, since DNS entries change. The host is resolved
once, every resolved address must be public, and the delivery connects to the address that was checked, which defeats
DNS rebinding.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from noria.errors import InvalidField, JobsUnavailable, short_repr

ResolveHost = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host for a port, in order of preference; raises OSError if there is none."""

MAX_URL_CHARS = 2048
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FIRST_USER_PORT = 1024  # below are the system's ports (RFC 6335): mail, shells, directories

# IANA's registries of special-purpose addresses, and multicast; `ipaddress.is_global` differs between Python versions.
_NOT_PUBLIC_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "168.63.129.16/32",  # Azure's services of a virtual machine
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")  # all that IANA has allocated so far
_NOT_PUBLIC_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # Teredo and others
            "2001:db8::/32",
            "2002::/16",  # 6to4: carries an IPv4 address
            "2620:4f:8000::/48",
            "3fff::/20",
        ),
    )
)
# IPv6-only networks reach IPv4 through this prefix (RFC 6052): the embedded IPv4 address is checked.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class WebhookTarget:
    """The checked destination of a delivery."""

    scheme: str  # http or https
    host: str  # as the Host header and the certificate name it, without brackets
    port: int
    address: str  # the checked address to connect to
    path: str  # with the query

    @property
    def url(self) -> str:
        """The URL with the address in place of the host."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def host_header(self) -> str:
        """The Host header: the host of the original URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


async def check_webhook_url(url: str, resolve: ResolveHost, *, allow_private: bool = False) -> WebhookTarget:
    """Resolve and check the URL of a webhook.

    Raises:
        InvalidField: for `webhook`; the URL is malformed or not http(s), or its host has no or no public address.
        JobsUnavailable: the host could not be looked up in time.
    """
    scheme, host, port, path = _split_url(url)
    try:
        addresses = await resolve(host, port)
    except (TimeoutError, socket.gaierror) as error:
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
            raise _invalid_webhook(url, f"its host {short_repr(host)} has no address ({error})") from error
        raise JobsUnavailable(
            f"the host {short_repr(host)} of the webhook could not be looked up now ({error}); try again later.",
            retry_after_s=5.0,
        ) from error
    except (OSError, UnicodeError) as error:
        raise _invalid_webhook(url, f"its host {short_repr(host)} has no address ({error})") from error
    if not addresses:
        raise _invalid_webhook(url, f"its host {short_repr(host)} has no address")
    if not allow_private:
        for text in addresses:
            if not is_public(text):
                # The message omits the address: internal addresses must not be disclosed.
                raise _invalid_webhook(
                    url,
                    f"its host {short_repr(host)} has an address that is not public; the operator can allow this "
                    "(jobs.webhook_allow_private)",
                )
        if port < _FIRST_USER_PORT and port not in _DEFAULT_PORTS.values():
            raise _invalid_webhook(
                url, f"its port is {port}; allowed are 80, 443, and those from {_FIRST_USER_PORT} on"
            )
    return WebhookTarget(scheme, host, port, addresses[0], path)


def is_public(text: str) -> bool:
    """Whether an address is on the public internet.

    IPv4 embedded in IPv6 is not public, except behind the NAT64 prefix.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # with a zone, such as fe80::1%eth0
        return False
    if isinstance(address, ipaddress.IPv6Address) and address in _NAT64:
        address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def _split_url(url: str) -> tuple[str, str, int, str]:
    """The scheme, host, port, and path with query."""
    if len(url) > MAX_URL_CHARS:
        raise _invalid_webhook(url, f"it has {len(url)} characters; at most {MAX_URL_CHARS} are allowed")
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:  # URL parsers disagree about these
        raise _invalid_webhook(
            url, "it has characters that a URL cannot have (spaces, backslashes, non-ASCII): percent-encode them"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _invalid_webhook(url, f"it is not a URL ({error})") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise _invalid_webhook(url, "allowed schemes are http:// and https://")
    if "@" in parts.netloc:
        raise _invalid_webhook(url, "it holds a user name or a password; webhooks are authenticated by their signature")
    if "%" in host or not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", host):
        raise _invalid_webhook(url, f"its host {short_repr(host)} is not a name or an address")
    if port == 0:
        raise _invalid_webhook(url, "its port is 0; allowed ports are 1 to 65535")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path


def _invalid_webhook(url: str, reason: str) -> InvalidField:
    return InvalidField(f"webhook is {short_repr(url)}: {reason}.", field="webhook")
