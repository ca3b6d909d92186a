"""Decides whether a request lost in an engine's exit is retried, retried exclusively, or failed.

Pure. The rules (ADR 6 has the reasons):

    how the engine ended                   request in flight      request not started
    crashed, or hung                       suspected              not_at_fault
    killed by a signal from outside        not_at_fault           not_started
    unknown, no report in time             suspected              suspected
    the same, on another machine           not_at_fault           not_at_fault
    with its machine, or replaced          not_at_fault           not_started

  - A suspected request is retried exclusively: nothing else is in flight at that engine, so a second crash is certainly
    its own.
    Then it fails.
  - A request that is not at fault is retried as before; after 3 such losses exclusively, and after 10 more it fails.
  - A loss before the start counts nothing: the request had not reached the device. Its deadline bounds it, as all
    retries.
"""

from dataclasses import dataclass, replace
from typing import Literal

from noria.protocol.messages import ExitCause

MAX_CRASHES = 2
MAX_NOT_AT_FAULT_SHARED = 3  # an engine may be killed for a reason that we cannot see and that lies in this request
MAX_NOT_AT_FAULT_EXCLUSIVE = 10

LossCause = Literal["suspected", "not_at_fault", "not_started"]


@dataclass(frozen=True)
class ExitReport:
    """How an engine's previous process ended, as its successor reports it."""

    exit_cause: ExitCause
    in_flight: frozenset[str]  # the attempts that it was generating or preparing

    def loss_cause(self, attempt_id: str) -> LossCause:
        """Return how the loss of this attempt counts."""
        was_in_flight = attempt_id in self.in_flight
        match self.exit_cause:
            case "crashed":
                return "suspected" if was_in_flight else "not_at_fault"
            case "killed":
                return "not_at_fault" if was_in_flight else "not_started"
            case "none":  # the successor knows of no previous process
                return "suspected"


@dataclass(frozen=True)
class AttemptHistory:
    """The lost attempts of one request."""

    num_crashes: int = 0
    num_not_at_fault: int = 0
    num_not_at_fault_exclusive: int = 0

    @property
    def needs_exclusive(self) -> bool:
        """Whether the next attempt must be alone at its engine."""
        return self.num_crashes > 0 or self.num_not_at_fault >= MAX_NOT_AT_FAULT_SHARED

    @property
    def crashes_engines(self) -> bool:
        """Whether the request has been shown to crash engines."""
        return self.num_crashes >= MAX_CRASHES

    @property
    def retries_exhausted(self) -> bool:
        """Whether the request fails after too many losses, at fault or not."""
        return self.num_not_at_fault_exclusive >= MAX_NOT_AT_FAULT_EXCLUSIVE

    def with_loss(self, cause: LossCause) -> "AttemptHistory":
        """Return the history with one more loss, of an attempt that was exclusive if `needs_exclusive`."""
        match cause:
            case "suspected":
                return replace(self, num_crashes=self.num_crashes + 1)
            case "not_at_fault" if self.needs_exclusive:
                return replace(self, num_not_at_fault_exclusive=self.num_not_at_fault_exclusive + 1)
            case "not_at_fault":
                return replace(self, num_not_at_fault=self.num_not_at_fault + 1)
            case "not_started":
                return self
