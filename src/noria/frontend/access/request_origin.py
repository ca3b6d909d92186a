"""Rejects requests that a web page makes its reader's browser send to this server.

DNS rebinding: the attacker's host name resolves to this server's address, so the page may read the responses. Its
requests have the attacker's name as Host, which is rejected. Cross-site requests: any page can send a POST without
reading the response. Browsers name the page in Sec-Fetch-Site and Origin, and foreign ones are rejected. Other clients
send neither header, so only their Host is checked. HTTP/1.0, which no browser speaks, needs no Host on the routes of
probes.
"""

import functools
import ipaddress
import re
from collections.abc import Awaitable, Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from noria.config import FrontendConfig
from noria.errors import ConfigError, CrossOriginRequest, HostNotAllowed, InvalidField, short_repr

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::\d{1,5})?")
_NUM_CACHED_HOSTS = 64  # checking one takes some microseconds


def check_hosts(allowed_hosts: Sequence[str]) -> None:
    """Raise ConfigError if one of `frontend.allowed_hosts` is more than a name, such as a URL."""
    for host in allowed_hosts:
        name = host.removeprefix("*.")
        if host != "*" and (not name or any(char in name for char in "*:/ ")):
            raise ConfigError(
                f"setting frontend.allowed_hosts has {short_repr(host)}. Allowed are names without a port, such as "
                "images.example, *.example for all names below it, and * for any."
            )


class RequestOriginCheck:
    """An ASGI application that checks Host, Sec-Fetch-Site and Origin before `app`.

    Load balancers ask `probe_paths` with HTTP/1.0, without a Host.
    """

    def __init__(self, app: ASGIApp, config: FrontendConfig, probe_paths: Collection[str]) -> None:
        self._app, self._probe_paths = app, frozenset(probe_paths)
        self._own_names = _Names([host for host in config.allowed_hosts if host != "*"])
        self._allowed_names = _Names(("localhost", "*.localhost", config.host, *config.allowed_hosts))
        self._allows = functools.lru_cache(_NUM_CACHED_HOSTS)(self._is_allowed)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request. No coroutine of its own, which would take longer than the check.

        Raises:
            InvalidField: it has no Host, or several.
            HostNotAllowed: its Host is no name of this server.
            CrossOriginRequest: a web page of another origin sends it, and it may change something; or asks whether it
                may, by a preflight.
        """
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if not hosts and self._is_old_probe(scope):
                return self._app(scope, receive, send)
            if len(hosts) != 1:
                raise InvalidField(f"the request has {len(hosts)} Host headers; send one.", field="Host")
            if not self._allows(hosts[0]):
                raise HostNotAllowed(
                    f"Host is {short_repr(hosts[0].decode('latin-1'))}; allowed are IP addresses, localhost and the "
                    "names in frontend.allowed_hosts (--allowed-hosts), to which the server's operator "
                    "can add this one."
                )
            if scope["method"] not in _SAFE_METHODS or _is_preflight(scope):
                self._check_origin(scope, hosts[0])
        return self._app(scope, receive, send)

    def _is_old_probe(self, scope: Scope) -> bool:
        """Whether a request is a health check as load balancers make it by default, such as HAProxy's OPTIONS."""
        is_safe = scope["method"] == "OPTIONS" or (
            scope["path"] in self._probe_paths and scope["method"] in _SAFE_METHODS
        )
        return is_safe and bool(scope["http_version"] == "1.0")

    def _is_allowed(self, host: bytes) -> bool:
        name = _name_of(host)
        return name is not None and (_is_address(name) or name in self._allowed_names)

    def _check_origin(self, scope: Scope, host: bytes) -> None:
        """Raise CrossOriginRequest as Go's http.CrossOriginProtection; browsers send no Sec-Fetch-Site without TLS."""
        headers = dict(scope["headers"])
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site in (b"same-origin", b"none") or (site is None and (origin is None or self._is_own(origin, host))):
            return
        sent = f"Origin is {short_repr((origin or b'').decode('latin-1'))}"
        if site is not None:
            sent = f"Sec-Fetch-Site is {short_repr(site.decode('latin-1'))}, and {sent}"
        method = scope["method"] if scope["method"] != "OPTIONS" else "preflight (CORS)"
        raise CrossOriginRequest(
            f"{sent}: a web page of another origin sends this {method}. Only this server's own pages may, and clients "
            "that are no browsers: call it from your server, or have a proxy serve it under the page's own origin."
        )

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        """Whether a page of `origin` is this server's. Proxies may replace the Host, so its own names count too."""
        authority = origin.partition(b"://")[2].lower()
        return authority == host.lower() or _name_of(authority) in self._own_names


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks for its page which requests are allowed (CORS)."""
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )


class _Names:
    """A set of host names; `*.example` has all names below `example`, and `*` has all."""

    def __init__(self, patterns: Sequence[str]) -> None:
        lowered = [pattern.lower() for pattern in patterns]
        self._names = frozenset(lowered)
        self._suffixes = tuple(pattern[1:] for pattern in lowered if pattern.startswith("*"))

    def __contains__(self, name: str | None) -> bool:
        return name is not None and (name in self._names or name.endswith(self._suffixes))


def _name_of(host: bytes) -> str | None:
    """Return the name or address in a Host header, without port and brackets; None if it is not valid."""
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return match and (match["ipv6"] or match["name"].removesuffix("."))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
