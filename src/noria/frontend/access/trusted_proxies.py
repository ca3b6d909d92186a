"""Checks `frontend.trusted_proxies`: the proxies whose X-Forwarded-For header names the client."""

import ipaddress
from collections.abc import Callable, Sequence

from noria.errors import ConfigError, short_repr

UNIX_CLIENT = "unix"
"""Stands for a client on a Unix socket, which has no address, in logs, limits and `frontend.trusted_proxies`."""
_MAPPED_BITS = 96  # length of the prefix ::ffff:0:0/96, the IPv4-mapped addresses (RFC 4291)


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


def in_both_forms(trusted_proxies: Sequence[str]) -> list[str]:
    """Return the proxies as networks, those of IPv4 also as a socket that listens on `::` names them: ::ffff:192.0.2.1.

    `unix` stays.
    """
    found = [proxy for proxy in trusted_proxies if proxy == UNIX_CLIENT]
    for network in (ipaddress.ip_network(proxy) for proxy in trusted_proxies if proxy != UNIX_CLIENT):
        found.append(str(network))
        if isinstance(network, ipaddress.IPv4Network):
            found.append(f"::ffff:{network.network_address}/{_MAPPED_BITS + network.prefixlen}")
        elif network.network_address.ipv4_mapped is not None and network.prefixlen >= _MAPPED_BITS:
            found.append(f"{network.network_address.ipv4_mapped}/{network.prefixlen - _MAPPED_BITS}")
    return found


def proxy_check(proxies: Sequence[str]) -> Callable[[str], bool]:
    """Return what says whether a connection's host is among `proxies`, which are `in_both_forms`."""
    networks = [ipaddress.ip_network(proxy) for proxy in proxies if proxy != UNIX_CLIENT]

    def is_proxy(host: str) -> bool:
        if host == UNIX_CLIENT:
            return UNIX_CLIENT in proxies
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in networks)

    return is_proxy
