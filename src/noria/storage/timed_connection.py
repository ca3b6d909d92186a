"""Connections to PostgreSQL whose statements end in time, also if the server stands still.

The server's own `statement_timeout` needs a server that runs, and some connection poolers reject it.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")


@dataclass
class StatementLimits:
    """The limits that hold for all connections of a pool; may be changed at any time, by any thread."""

    timeout_s: float  # limit of each statement
    interrupted: bool = False  # statements that wait fail now, and so do all later ones and new connections


class TimedConnection(psycopg.Connection[Any]):
    """A connection that is closed, with an OperationalError, when a statement takes too long."""

    limits = StatementLimits(float("inf"))

    @classmethod
    def open(cls, limits: StatementLimits, *args: Any, **parameters: Any) -> "TimedConnection":
        """Connect; psycopg's `connect_timeout` bounds it."""
        if limits.interrupted:
            raise psycopg.OperationalError("the pool of connections is closing")
        connection = cls.connect(*args, **parameters)
        connection.limits = limits
        return connection

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait for what psycopg waits for, within the limits."""
        return super().wait(self._limited(gen), *args, **options)

    def _limited(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Forward `gen`, which psycopg resumes at least every 0.1 s, until the time is over."""
        deadline = time.monotonic() + self.limits.timeout_s
        ready = None
        while True:
            try:
                waits_for = gen.send(ready)
            except StopIteration as end:
                result: T = end.value
                return result
            ready = yield waits_for
            if not ready and (self.limits.interrupted or time.monotonic() > deadline):
                self.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {self.limits.timeout_s:g} s")
