"""The audit log of rejected clients: unknown and revoked keys, missing scopes, limits. Bounded, whatever they send.

The first rejection of a client for a reason is logged at once; what follows is counted, and logged every
`_INTERVAL_S` as one line. Each front end logs its own. The key that was sent is never logged, its name is.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from noria.errors import MissingScope, NoriaError, RateLimited, Unauthorized
from noria.frontend.access.auth import ClientDirectory, presented_key
from noria.frontend.access.concurrency_limits import client_id
from noria.observe.logs.log_record import fields

_log = logging.getLogger("noria.keys")

Reason = Literal["unknown_key", "revoked_key", "missing_scope", "rate_limited"]

_INTERVAL_S = 10.0
_POLL_INTERVAL_S = 1.0
_MAX_ADDRESSES = 64  # addresses of a front end's clients without a valid key; further ones share a line for each reason
_MAX_ADDRESS_CHARS = 64  # a trusted proxy may pass on whatever its client sent


@dataclass
class _Rejections:
    """The rejections of one client for one reason that are not logged yet."""

    has_valid_key: bool
    key: str | None = None  # the name of the last one, if it is or was valid
    address: str | None = None  # address of the last one; None: of many
    error: str = ""  # message of the last one
    num_pending: int = 0
    logged_at: float = 0.0


class RejectionLog:
    """Logs the rejected requests of one front end. Await `run` in a task."""

    def __init__(self, clients: ClientDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._clients, self._clock = clients, clock
        self._rejections: dict[tuple[str, Reason], _Rejections] = {}

    async def run(self) -> None:
        """Log what is pending whenever it is due, and the rest when cancelled."""
        try:
            while True:
                await asyncio.sleep(_POLL_INTERVAL_S)
                self.log_due()
        finally:
            for (client, reason), rejections in self._rejections.items():
                self._write(client, reason, rejections)

    def record(self, http: Request, error: NoriaError) -> None:
        """Count `error` if it rejects the client of `http` as such; else nothing happens."""
        match error:
            case MissingScope():
                self._add("missing_scope", http, error)
            case RateLimited():
                self._add("rate_limited", http, error)
            case Unauthorized():
                key = presented_key(http.headers)
                if key is not None:  # browsers begin without one, and then ask their user
                    name = self._clients.revoked_name(key)
                    self._add("unknown_key" if name is None else "revoked_key", http, error, name)

    def log_due(self) -> None:
        """Log what has been pending for `_INTERVAL_S`, and forget who has been quiet for as long."""
        now = self._clock()
        for (client, reason), rejections in list(self._rejections.items()):
            if now - rejections.logged_at >= _INTERVAL_S:
                if not rejections.num_pending:
                    del self._rejections[client, reason]
                self._write(client, reason, rejections)

    def _add(self, reason: Reason, http: Request, error: NoriaError, revoked: str | None = None) -> None:
        api_client = http.scope["state"].get("api_client")
        name = None if api_client is None else api_client.name
        address = None if http.client is None else http.client.host
        client = client_id(name, address)
        if name is None and (client, reason) not in self._rejections and self._num_addresses() >= _MAX_ADDRESSES:
            client, address = "other clients", None
        rejections = self._rejections.get((client, reason))
        is_first = rejections is None
        if rejections is None:
            rejections = self._rejections[client, reason] = _Rejections(has_valid_key=name is not None)
        rejections.key, rejections.error = name or revoked, error.message
        rejections.address = address and address[:_MAX_ADDRESS_CHARS]
        rejections.num_pending += 1
        if is_first:
            self._write(client, reason, rejections)

    def _num_addresses(self) -> int:
        return sum(not each.has_valid_key for each in self._rejections.values())

    def _write(self, client: str, reason: Reason, rejections: _Rejections) -> None:
        if not rejections.num_pending:
            return
        log_fields = fields(
            event="client_rejected",
            reason=reason,
            key=rejections.key,
            client=rejections.address,
            num_requests=rejections.num_pending,
            error=rejections.error,
        )
        message = "%s: %d requests rejected (%s)"
        _log.warning(message, client, rejections.num_pending, reason, extra=log_fields)
        rejections.num_pending, rejections.logged_at = 0, self._clock()
