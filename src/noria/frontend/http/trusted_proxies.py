"""Which proxies are believed about who asks (`frontend.trusted_proxies`)."""

import ipaddress
from collections.abc import Sequence

from noria.errors import ConfigError, short_repr


def check_proxies(trusted_proxies: Sequence[str]) -> None:
    """Raise ConfigError if one is neither an address nor a network: uvicorn, which looks for them, would overlook it."""
    for proxy in trusted_proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ConfigError(
                f"setting frontend.trusted_proxies has {short_repr(proxy)}: {error}. Allowed are addresses, such as 192.0.2.1, and networks, such "
                "as 192.0.2.0/24 or 2001:db8::/32."
            ) from error
