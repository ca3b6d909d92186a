"""New connections that a process accepts: not too many in all or of one client, and none that needs its last files."""

import contextlib
import functools
import logging
import resource
import socket
from collections.abc import Callable

from noria.errors import RateLimited
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter, client_id
from noria.observe.logs.log_record import fields

RESERVED_DESCRIPTORS = 16
"""The process's last file descriptors are for files and databases: a connection that gets one of them is closed."""
_GRPC_SHARE = 4
_LOG_INTERVAL_S = 60.0

log = logging.getLogger("noria.frontend")


def max_grpc_connections(max_files: int) -> int:
    """Return how many connections the gRPC port of a process may have that may have `max_files` open: a quarter."""
    return max_files // _GRPC_SHARE


class ConnectionAdmission:
    """Counts the connections of one server. Connections that it does not accept are closed unanswered."""

    def __init__(
        self,
        limiter: ConcurrencyLimiter | None = None,
        is_proxy: Callable[[str], bool] = lambda _host: False,
        *,
        is_beside_grpc: bool = False,
    ) -> None:
        """Connections of proxies count in all only; `is_beside_grpc` leaves the descriptors of a gRPC port free."""
        self._limiter, self._is_beside_grpc = limiter, is_beside_grpc
        # Parsing an address takes as long as accepting its connection. Whose a proxy's connections are is not known.
        self._client_of = functools.lru_cache(1024)(lambda host: None if is_proxy(host) else client_id(None, host))
        self._next_log_at = 0.0

    def admit(self, sock: socket.socket, host: str, now: float) -> contextlib.ExitStack | None:
        """Count a new connection from `host` until what is returned is closed; None: it must be closed unanswered.

        Logs a warning then, at most once a minute.
        """
        held = contextlib.ExitStack()
        num_allowed = self._num_allowed_files
        if sock.fileno() >= num_allowed:  # the kernel assigns the lowest that is free
            message = (
                f"connections are closed unanswered: {num_allowed} of the {self._max_files} files that this process "
                "may have open are in use; raise the limit (ulimit -Hn, LimitNOFILE)"
            )
            self._warn(now, message, max_files=self._max_files)
            return None
        if self._limiter is None:
            return held
        try:
            held.enter_context(self._limiter.hold(self._client_of(host)))
        except RateLimited as error:
            self._warn(now, f"a connection is closed unanswered: {error.message}")
            return None
        return held

    @functools.cached_property
    def _max_files(self) -> int:
        """The files that this process may have open; a process sets its limit before its first connection."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @functools.cached_property
    def _num_allowed_files(self) -> int:
        reserved = max_grpc_connections(self._max_files) if self._is_beside_grpc else 0
        return self._max_files - RESERVED_DESCRIPTORS - reserved

    def _warn(self, now: float, message: str, **named: object) -> None:
        if now >= self._next_log_at:
            self._next_log_at = now + _LOG_INTERVAL_S
            log.warning("%s", message, extra=fields(event="connections_rejected", **named))
