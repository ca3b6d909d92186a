"""Scheduling policies: each is a pure function from an image and the time to a sort key; the lowest key goes first.

The key of an image that waits does not change as time passes, unless its deadline becomes infeasible or costs change:
so waiting images are kept sorted (`step/waiting_queue.py`).

A policy orders images twice: which ones have slots when slots are scarce, and which ones step when the profitable batch
is smaller than the running set (pausing an image is free: its latents stay in its slot, or wait in the host's memory).
Under every policy, waiting improves an image's rank, so no image starves.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct

from noria.protocol.request import Priority


class Candidate(Struct, frozen=True):
    """The facts that a policy knows of an image; times are monotonic seconds."""

    arrived_at: float
    deadline: float | None  # requested by the caller; None: no deadline
    priority: Priority
    remaining_s: float  # seconds of work, at the expected batch size
    min_remaining_s: float  # seconds of work, with the device to itself
    # The latest deadline that its client's share of the device implies (`shares/fair_shares.py`); infinity: none.
    fair_deadline: float = math.inf


Policy = Callable[[Candidate, float], float]

IMPLICIT_DEADLINE_S: Mapping[Priority, float] = MappingProxyType({"high": 5.0, "normal": 60.0, "low": 600.0})
"""Deadline, in seconds after arrival, by which `least_slack` ranks an image that has none."""

_PRIORITY_OFFSET_S: Mapping[Priority, float] = MappingProxyType({"high": -30.0, "normal": 0.0, "low": 30.0})
# Ranks an image that cannot meet its deadline behind all that can, and behind images that have waited for an hour.
INFEASIBLE_PENALTY_S = 3600.0
# Costs are known to within 15 %: an image predicted to be late by less than that may still meet its deadline.
COST_UNCERTAINTY = 0.85
_AGING_RATE = 0.5  # seconds of work offset by one second of waiting


def least_slack(image: Candidate, now: float) -> float:
    """Earliest deadline first, which maximizes the smallest slack at completion (Jackson, 1955).

    Ordering by momentary slack (deadline less remaining work) would be as good on a device that serves one image at a
    time, but it changes at every step: two equally urgent images would alternate and both finish late, and no
    completion time could be predicted. An image without a deadline gets an implicit one, so it rises while it waits
    until it is first. An image that can no longer meet its deadline goes last, because it would only delay others.
    """
    if image.deadline is None:
        return image.arrived_at + IMPLICIT_DEADLINE_S[image.priority]
    if _is_infeasible(image, now):
        return image.deadline + INFEASIBLE_PENALTY_S
    return image.deadline + _PRIORITY_OFFSET_S[image.priority]


def fair(image: Candidate, now: float) -> float:
    """Rank as `least_slack` does, except that nobody waits for somebody else's many images.

    An image goes ahead of those of other clients whose turn is later (`shares/fair_shares.py`), which is decided when
    it arrives. With one client this is `least_slack`.
    """
    if image.deadline is None and image.fair_deadline < math.inf:
        return image.fair_deadline
    key = least_slack(image, now)
    return key if _is_infeasible(image, now) else min(key, image.fair_deadline)


def fcfs(image: Candidate, now: float) -> float:  # noqa: ARG001 - a policy's signature
    """First come, first served; ignores deadlines and priorities."""
    return image.arrived_at


def shortest_first(image: Candidate, now: float) -> float:  # noqa: ARG001 - a policy's signature
    """Least remaining work first; a second of waiting offsets half a second of work.

    Ignores deadlines and priorities.
    """
    return image.remaining_s + _AGING_RATE * image.arrived_at


def _is_infeasible(image: Candidate, now: float) -> bool:
    return image.deadline is not None and image.deadline - now < COST_UNCERTAINTY * image.min_remaining_s


def uses_deadlines(policy: Policy) -> bool:
    """Whether batches must stay small enough to meet deadlines; policies that ignore deadlines do not need that."""
    return policy in (fair, least_slack)


def shares_fairly(policy: Policy) -> bool:
    """Whether clients share the device by their weights; other policies do not know clients."""
    return policy is fair


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"fair": fair, "least-slack": least_slack, "fcfs": fcfs, "shortest-first": shortest_first}
)
