"""New connections that a process accepts: not too many in all or of one client, and none that needs its last files."""

import contextlib
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
        self._limiter, self._is_proxy, self._is_beside_grpc = limiter, is_proxy, is_beside_grpc
        self._next_log_at = 0.0

    def admit(self, sock: socket.socket, host: str, now: float) -> contextlib.ExitStack | None:
        """Count a new connection from `host` until what is returned is closed; None: it must be closed unanswered.

        Logs a warning then, at most once a minute.
        """
        held = contextlib.ExitStack()
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_allowed = max_files - RESERVED_DESCRIPTORS
        if self._is_beside_grpc:
            num_allowed -= max_grpc_connections(max_files)
        if sock.fileno() >= num_allowed:  # the kernel assigns the lowest that is free
            message = (
                f"connections are closed unanswered: {num_allowed} of the {max_files} files that this process may have "
                "open are in use; raise the limit (ulimit -Hn, LimitNOFILE)"
            )
            self._warn(now, message, max_files=max_files)
            return None
        if self._limiter is None:
            return held
        try:
            held.enter_context(self._limiter.hold(None if self._is_proxy(host) else client_id(None, host)))
        except RateLimited as error:
            self._warn(now, f"a connection is closed unanswered: {error.message}")
            return None
        return held

    def _warn(self, now: float, message: str, **named: object) -> None:
        if now >= self._next_log_at:
            self._next_log_at = now + _LOG_INTERVAL_S
            log.warning("%s", message, extra=fields(event="connections_rejected", **named))
