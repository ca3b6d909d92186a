"""Whether a database and its files could be used of late: logs why not, for operators, and tells it to readers."""

import logging
import time

from sqlalchemy.exc import DBAPIError

from noria.observe.logs.log_record import fields

INTERVAL_S = 60.0
"""Between two warnings; and a failure is told for so long: calls that only read may succeed on a full disk."""

log = logging.getLogger("noria.storage")


class OutageLog:
    """The failed calls of one database and its files, of all threads of a process."""

    def __init__(self) -> None:
        self._reason, self._failed_at, self._warned_at = "", float("-inf"), float("-inf")

    def add(self, failed_part: str, error: BaseException) -> None:
        """Record that a call failed, because `failed_part` raised `error`; log a warning, at most one a minute."""
        now = time.monotonic()
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        reason = str(cause).strip().partition("\n")[0]
        self._reason, self._failed_at = f"the {failed_part}: {_public(cause, reason)}", now
        if now - self._warned_at >= INTERVAL_S:
            self._warned_at = now
            log.warning("the %s cannot be used: %s", failed_part, reason, extra=fields(event="storage_failed"))

    @property
    def reason(self) -> str | None:
        """Why the last call failed that did, without paths and hosts; None: none failed in the last minute."""
        return self._reason if time.monotonic() - self._failed_at < INTERVAL_S else None


def _public(error: BaseException, reason: str) -> str:
    """Return what anybody may read: SQLite's own words name no file, and an OSError's number has fixed words."""
    if isinstance(error, OSError):
        return error.strerror or "it failed"
    return reason if type(error).__module__ == "sqlite3" else "it does not answer"
