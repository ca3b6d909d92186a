"""So many at once, and so many of them one client's: for what holds memory here as long as its client wants.

A client is who has one API key; where there are no keys, who comes from one address. Pure.
"""

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator

from starlette.requests import Request

from noria.errors import RateLimited, shown

_PREFIX_BITS = 64  # what one subscriber of IPv6 is given at least (RFC 6177), each address in it at no cost


class Places:
    """Those of one kind, in one front end."""

    def __init__(self, what: str, most: int, most_each: int, come_again_s: float) -> None:
        """`what` they are for, in the plural; who is refused one is told to come again in `come_again_s`."""
        self._what, self._most, self._most_each, self._come_again_s = what, most, most_each, come_again_s
        self._taken: Counter[str] = Counter()  # by client; none is 0

    def take(self, client: str) -> None:
        """Take one for `client`: `leave` has to follow. Raises RateLimited."""
        if self._taken[client] >= self._most_each:
            raise self._refusal(
                f"{client} has {self._taken[client]} {self._what} already, which is as many as one client may have of the {self._most} "
                "of a front end; come again when one has ended."
            )
        if self._taken.total() >= self._most:
            raise self._refusal(
                f"{self._most} {self._what} are under way already, which is as many as one front end has; come again when one has ended."
            )
        self._taken[client] += 1

    def leave(self, client: str) -> None:
        """Give one back."""
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]

    @contextlib.contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Take one and give it back. Raises RateLimited."""
        self.take(client)
        try:
            yield
        finally:
            self.leave(client)

    def _refusal(self, message: str) -> RateLimited:
        return RateLimited(message, retry_after_s=self._come_again_s)


def client_of(http: Request) -> str:
    """Who asks, in words: whose places are counted together. The route has to be behind a `Gate`."""
    return client_named(http.state.caller.name, None if http.client is None else http.client.host)


def client_named(key: str | None, host: str | None) -> str:
    """The client with the key of that name, else from `host`: an address, or what a trusted proxy says instead of one."""
    if key is not None:
        return f"the key {key!r}"
    if host is None:  # it left before it could be asked for its name
        return "an unknown address"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"the address {shown(host)}"
    if isinstance(address, ipaddress.IPv4Address):
        return f"the address {address}"
    if address.ipv4_mapped is not None:
        return f"the address {address.ipv4_mapped}"
    return f"the network {ipaddress.ip_network((int(address), _PREFIX_BITS), strict=False)}"
