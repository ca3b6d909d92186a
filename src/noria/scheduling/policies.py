"""Who goes first when not all can: a policy is one pure function from an image and the time to a number; the lowest goes first.

It decides twice: who boards when slots are few, and who steps when the batch that pays is smaller than what is seated (to be paused
costs an image nothing: its latents stay in its slot). Every policy lets those who wait rise, so that nobody starves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from noria.protocol.request import Priority


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of an image; times are monotonic seconds."""

    arrived_at: float
    deadline: float | None  # the caller's own; None: whenever it is done
    priority: Priority
    remaining_s: float  # work left, in the company that is usual now
    min_remaining_s: float  # work left, if it had the device to itself


Policy = Callable[[Candidate, float], float]

IMPLICIT_DEADLINE_S: Mapping[Priority, float] = MappingProxyType({"high": 5.0, "normal": 60.0, "low": 600.0})
"""After how long an image without a deadline is as urgent as one whose deadline is now."""

_PRIORITY_OFFSET_S: Mapping[Priority, float] = MappingProxyType({"high": -30.0, "normal": 0.0, "low": 30.0})
_INFEASIBLE_PENALTY_S = 3600.0  # behind all who can still be in time, and behind an hour of waiting
COST_UNCERTAINTY = 0.85  # costs are known to 15 %: what would be late by less than that may still be in time
_AGING_RATE = 0.5  # seconds of work that a second of waiting makes up for


def least_slack(image: Candidate, now: float) -> float:
    """So that the least slack that anybody has when done is as great as can be: by deadline (Jackson, 1955).

    Momentary slack (deadline less work left) would be as good for a device that serves one at a time, but changes with every step: two
    images that are equally urgent would take turns and both be done late, and nobody could be promised when. An image without a
    deadline is due when its patience ends; so it rises while it waits, until it goes first. One that cannot be in time any more
    goes last: it would only make others late.
    """
    if image.deadline is None:
        return image.arrived_at + IMPLICIT_DEADLINE_S[image.priority] - now
    left_s = image.deadline - now
    if left_s < COST_UNCERTAINTY * image.min_remaining_s:
        return left_s + _INFEASIBLE_PENALTY_S
    return left_s + _PRIORITY_OFFSET_S[image.priority]


def fcfs(image: Candidate, now: float) -> float:  # noqa: ARG001 - a policy's signature
    """First come, first served, whatever was asked for."""
    return image.arrived_at


def shortest_first(image: Candidate, now: float) -> float:
    """Least work first; a second of waiting counts as half a second of work less. Deadlines and priorities mean nothing."""
    return image.remaining_s - _AGING_RATE * (now - image.arrived_at)


def uses_deadlines(policy: Policy) -> bool:
    """Whether batches are to stay small enough for deadlines; a policy that does not ask for them has no use for that."""
    return policy is least_slack


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"least-slack": least_slack, "fcfs": fcfs, "shortest-first": shortest_first}
)
