"""Limits how many uses of a resource run at once, in total and per client.

For what holds memory as long as its client wants. A client is an API key; without keys, an IPv4 address or an IPv6 /64
network.
"""

import contextlib
import functools
import ipaddress
from collections import Counter
from collections.abc import Iterator

from noria.errors import RateLimited, short_repr

_PREFIX_BITS = 64  # an IPv6 subscriber gets at least a /64 (RFC 6177) and may use any address in it


class ConcurrencyLimiter:
    """Counts the uses of one resource in one front end."""

    def __init__(self, resource_name: str, max_total: int, max_per_client: int, retry_after_s: float) -> None:
        """`resource_name` is a plural, for messages; `retry_after_s` is the Retry-After of a rejection."""
        self._resource_name = resource_name
        self._max_total, self._max_per_client = max_total, max_per_client
        self._retry_after_s = retry_after_s
        self._num_in_use: Counter[str] = Counter()  # by client; no entry is 0
        self._total = 0

    def acquire(self, client: str | None, num: int = 1) -> None:
        """Count `num` uses by `client` until `release`; None counts in total only. Raises RateLimited."""
        if client is not None and self._num_in_use[client] + num > self._max_per_client:
            raise self._rate_limited(
                f"{client} has {self._num_in_use[client]} {self._resource_name} already, and one client may have "
                f"{self._max_per_client} of the {self._max_total} of a front end; try again when one has ended."
            )
        if self._total + num > self._max_total:
            raise self._rate_limited(
                f"{self._total} {self._resource_name} are under way already, and a front end may have "
                f"{self._max_total}; try again when one has ended."
            )
        self._total += num
        if client is not None:
            self._num_in_use[client] += num

    def release(self, client: str | None, num: int = 1) -> None:
        """End `num` uses by `client`."""
        self._total -= num
        if client is None:
            return
        self._num_in_use[client] -= num
        if not self._num_in_use[client]:
            del self._num_in_use[client]

    @contextlib.contextmanager
    def hold(self, client: str | None, num: int = 1) -> Iterator[None]:
        """Acquire, and release at the end of the context. Raises RateLimited."""
        self.acquire(client, num)
        try:
            yield
        finally:
            self.release(client, num)

    def _rate_limited(self, message: str) -> RateLimited:
        return RateLimited(message, retry_after_s=self._retry_after_s)


@functools.lru_cache(256)
def client_id(key: str | None, host: str | None) -> str:
    """Name a client, for counting and for messages: by its key's name, else by `host`.

    `host` is an address, or whatever a trusted proxy sent in its place; None if the client disconnected too early.
    """
    if key is not None:
        return f"the key {key!r}"
    if host is None:
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
