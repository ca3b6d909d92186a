"""Authentication: finds the API key in a request's headers and the client that it belongs to.

Without a file of keys every request is accepted, and all of them share one client without limits.
"""

import base64
import binascii
import hmac
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from noria.errors import Unauthorized
from noria.frontend.access.api_keys import ApiKey, KeyScope, format_scopes, key_digest
from noria.frontend.access.concurrency_limits import client_id
from noria.frontend.access.quotas import ApiClient
from noria.frontend.access.trusted_proxies import UNIX_CLIENT
from noria.observe.logs.log_record import fields

_log = logging.getLogger("noria.keys")
REGISTRY_SCOPES: frozenset[KeyScope] = frozenset({"lineage", "deploy"})
_MAX_REVOKED_KEYS = 1000  # remembered, for the log


class ClientDirectory:
    """The clients of one front end: one `ApiClient` per key, kept until the key is revoked."""

    def __init__(self, keys: Sequence[ApiKey], num_processes: int, client_header: str = "") -> None:
        """`num_processes` front ends share each key's limits; `client_header` names clients without keys."""
        self.num_processes, self.client_header = num_processes, client_header
        self._clients = {key: ApiClient(key, num_processes) for key in keys}
        self._anonymous_client = None if keys else ApiClient(None, num_processes)
        self._revoked_names: dict[str, str] = {}  # by digest
        if keys:
            described = [f"{key.name}: {format_scopes(key.scopes)}" for key in keys]
            _log.info("%d keys are accepted", len(keys), extra=fields(event="api_keys_loaded", keys=described))

    def update(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on, and no others; log which are new, changed and revoked.

        What a revoked key has begun is completed; what a changed one has begun still counts.
        """
        before, after = ({key.sha256: key for key in each} for each in (self._clients, keys))
        clients = {key.sha256: client for key, client in self._clients.items()}
        for digest, key in after.items():
            if digest not in before:
                clients[digest] = ApiClient(key, self.num_processes)
            elif key != before[digest]:
                clients[digest].update(key, self.num_processes)
        self._clients = {key: clients[key.sha256] for key in keys}
        for digest, key in after.items():
            self._revoked_names.pop(digest, None)
            if digest not in before:
                _log.info("the key %r is accepted", key.name, extra=_log_fields("api_key_added", key))
            elif key != before[digest]:
                _log.info("the key %r is changed", key.name, extra=_log_fields("api_key_changed", key))
        for digest in before.keys() - after.keys():
            self._revoked_names[digest] = before[digest].name
            _log.info(
                "the key %r is revoked", before[digest].name, extra=_log_fields("api_key_revoked", before[digest])
            )
        for digest in list(self._revoked_names)[:-_MAX_REVOKED_KEYS]:
            del self._revoked_names[digest]

    def share_among(self, num_processes: int) -> None:
        """Grant the share of one of `num_processes` front ends from now on; what is in flight and charged still counts.

        A rate's bucket stays as full as it is in proportion, so that all front ends together never hold more than a
        minute's worth.
        """
        self.num_processes = num_processes
        for key, client in self._clients.items():
            client.update(key, num_processes)

    def revoked_name(self, key: bytes) -> str | None:
        """Return the name of a key that was revoked since the start; None if it was not."""
        return self._revoked_names.get(key_digest(key))

    def find(self, headers: Mapping[str, str]) -> ApiClient:
        """Return the client whose key is in `headers`.

        Compares all digests, each in constant time, so that the duration reveals nothing about the keys.

        Raises Unauthorized: there is no key, or it is unknown.
        """
        if self._anonymous_client is not None:
            return self._anonymous_client
        presented = presented_key(headers)
        if presented is None:
            raise Unauthorized(
                "this server needs an API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`, or KEY as the "
                "password of Basic authentication."
            )
        digest = key_digest(presented)
        matches = [client for key, client in self._clients.items() if hmac.compare_digest(digest, key.sha256)]
        if not matches:
            raise Unauthorized("the API key is not known here; ask the server's operator for one.")
        return matches[0]


def _log_fields(event: str, key: ApiKey) -> dict[str, dict[str, object]]:
    limits = {"max_images_in_flight": key.max_images_in_flight, "images_per_minute": key.images_per_minute}
    return fields(event=event, key=key.name, scopes=format_scopes(key.scopes), priority=key.priority, **limits)


def is_local(http: Request) -> bool:
    """Return whether a request is from this machine; behind a proxy a header says that, which may be the client's."""
    return is_this_machine(http.scope["client"]) and "x-forwarded-for" not in http.headers


def is_this_machine(client: Sequence[Any] | None) -> bool:
    """Return whether a connection is from a Unix socket or a loopback address."""
    host = "" if client is None else str(client[0])
    try:
        return host == UNIX_CLIENT or ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def presented_key(headers: Mapping[str, str]) -> bytes | None:
    """Return the key in `headers`, or None.

    X-Api-Key comes before Authorization, which a proxy may use for its own authentication.
    """
    if (api_key := headers.get("x-api-key")) is not None:
        return api_key.strip().encode("latin-1")
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip().encode("latin-1")
        case "basic":
            return _password(rest.strip())
    return None


def _password(credentials: str) -> bytes | None:
    """Return the password of Basic authentication (RFC 7617): all after the first colon. The user name is ignored."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):  # not base64, not ASCII
        return None


def client_id_of(http: Request) -> str:
    """Return the client of a request, as `client_id` does. Its operation must need a key."""
    connected: tuple[str, int] | None = http.scope.get("client")
    return client_id(http.scope["state"]["api_client"].name, None if connected is None else connected[0])
