"""So many at once, and so many of them one client's: for what holds memory here as long as its client wants.

A client is who has one API key; where there are no keys, who comes from one address. Pure.
"""

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator

from starlette.requests import Request

from noria.errors import RateLimited, short_repr

_PREFIX_BITS = 64  # what one subscriber of IPv6 is given at least (RFC 6177), each address in it at no cost


class ConcurrencyLimiter:
    """Those of one kind, in one front end."""

    def __init__(self, resource_name: str, max_total: int, max_per_client: int, retry_after_s: float) -> None:
        """`what` they are for, in the plural; who is refused one is told to come again in `come_again_s`."""
        self._resource_name, self._max_total, self._max_per_client, self._retry_after_s = (
            resource_name,
            max_total,
            max_per_client,
            retry_after_s,
        )
        self._num_in_use: Counter[str] = Counter()  # by client; none is 0

    def acquire(self, client: str) -> None:
        """Take one for `client`: `leave` has to follow. Raises RateLimited."""
        if self._num_in_use[client] >= self._max_per_client:
            raise self._rate_limited(
                f"{client} has {self._num_in_use[client]} {self._resource_name} already, which is as many as one client may have of the {self._max_total} "
                "of a front end; come again when one has ended."
            )
        if self._num_in_use.total() >= self._max_total:
            raise self._rate_limited(
                f"{self._max_total} {self._resource_name} are under way already, which is as many as one front end has; come again when one has ended."
            )
        self._num_in_use[client] += 1

    def release(self, client: str) -> None:
        """Give one back."""
        self._num_in_use[client] -= 1
        if not self._num_in_use[client]:
            del self._num_in_use[client]

    @contextlib.contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Take one and give it back. Raises RateLimited."""
        self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def _rate_limited(self, message: str) -> RateLimited:
        return RateLimited(message, retry_after_s=self._retry_after_s)


def client_id_of(http: Request) -> str:
    """Who asks, in words: whose places are counted together. The route has to be behind a `Gate`."""
    return client_id(http.state.caller.name, None if http.client is None else http.client.host)


def client_id(key: str | None, host: str | None) -> str:
    """The client with the key of that name, else from `host`: an address, or what a trusted proxy says instead of one."""
    if key is not None:
        return f"the key {key!r}"
    if host is None:  # it left before it could be asked for its name
        return "an unknown address"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"the address {short_repr(host)}"
    if isinstance(address, ipaddress.IPv4Address):
        return f"the address {address}"
    if address.ipv4_mapped is not None:
        return f"the address {address.ipv4_mapped}"
    return f"the network {ipaddress.ip_network((int(address), _PREFIX_BITS), strict=False)}"
