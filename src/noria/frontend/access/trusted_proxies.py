"""Checks `frontend.trusted_proxies`: the proxies whose X-Forwarded-For header names the client."""

import ipaddress
from collections.abc import Sequence

from noria.errors import ConfigError, short_repr
from noria.frontend.http.connection import UNIX_CLIENT


def check_proxies(trusted_proxies: Sequence[str]) -> None:
    """Raise ConfigError if one is neither an address nor a network; uvicorn would silently ignore it."""
    for proxy in trusted_proxies:
        if proxy == UNIX_CLIENT:
            continue
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ConfigError(
                f"setting frontend.trusted_proxies has {short_repr(proxy)}: {error}. Allowed are addresses, such as "
                f"192.0.2.1, networks, such as 192.0.2.0/24 or 2001:db8::/32, and {UNIX_CLIENT}."
            ) from error
