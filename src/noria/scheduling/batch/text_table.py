"""The accepted requests and their texts, waiting or in a batch. Bookkeeping only: decides nothing."""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from noria.protocol.request import Priority
from noria.scheduling.types import BatchKey, ItemId, RequestTimings, SchedulableRequest


class WaitingText(NamedTuple):
    """A waiting text; sorts by length, then by arrival."""

    num_tokens: int
    number: int  # of its request
    text_index: int
    attempt_id: str

    @property
    def row(self) -> ItemId:
        """Its identity in plans and events."""
        return ItemId(self.attempt_id, self.text_index)


class Group(NamedTuple):
    """Texts that are selected together."""

    batch_key: BatchKey
    priority: Priority
    exclusive_id: str  # of the exclusive request whose texts they are; else empty


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that has not ended."""

    request: SchedulableRequest
    arrived_at: float
    number: int  # in order of arrival
    rank: float  # by the policy; the lowest goes first
    exclusive: bool  # runs with no other request
    unfinished: set[int]  # indices of texts not yet done
    waiting: dict[int, None] = field(default_factory=dict)  # indices of texts, the longest first
    waiting_tokens: int = 0
    promised_s: float = 0.0  # its duration as predicted at admission, uncorrected; 0 if it did not have to wait
    is_late: bool = False  # it cannot meet its deadline any more, and is ranked behind all others
    timings: RequestTimings = RequestTimings()  # of the text finished last

    @property
    def deadline(self) -> float:
        """Its deadline, in monotonic seconds; infinity if it has none."""
        return math.inf if self.request.deadline is None else self.request.deadline

    @property
    def group(self) -> Group:
        """Where its texts wait."""
        request = self.request
        return Group(request.batch_key, request.priority, request.attempt_id if self.exclusive else "")


@dataclass(slots=True)
class TextTable:
    """Requests by id, those with waiting texts in the policy's order, and waiting texts by length."""

    requests: dict[str, ActiveRequest] = field(default_factory=dict)
    groups: dict[Group, list[WaitingText]] = field(default_factory=dict)  # each sorted; none is empty
    num_waiting: int = 0
    waiting_tokens: Counter[BatchKey] = field(default_factory=Counter)
    _order: list[tuple[float, int, ActiveRequest]] = field(default_factory=list)  # sorted by rank and number
    _num_added: int = 0

    def add(self, request: SchedulableRequest, arrived_at: float, rank: float) -> ActiveRequest:
        """Add a request; all its texts wait."""
        self._num_added += 1
        indices = range(request.num_images)
        active = ActiveRequest(request, arrived_at, self._num_added, rank, request.exclusive, set(indices))
        self.requests[request.attempt_id] = active
        self.put_back(active, indices)
        return active

    def in_order(self) -> Iterable[ActiveRequest]:
        """Requests with waiting texts, the first one first. Do not change the table while iterating."""
        return (active for _, _, active in self._order)

    def in_reverse_order(self) -> Iterable[ActiveRequest]:
        """As `in_order`, the last one first."""
        return (active for _, _, active in reversed(self._order))

    def behind(self, active: ActiveRequest) -> Iterable[ActiveRequest]:
        """Requests with waiting texts that come after `active`, which has some."""
        position = bisect_left(self._order, (active.rank, active.number))
        return (each for _, _, each in self._order[position + 1 :])

    def first(self) -> ActiveRequest | None:
        """Return the first request with waiting texts."""
        return self._order[0][2] if self._order else None

    def change_rank(self, active: ActiveRequest, rank: float) -> None:
        """Change the rank of a request with waiting texts."""
        self._remove_from_order(active)
        active.rank = rank
        insort(self._order, (rank, active.number, active))

    def make_exclusive(self, active: ActiveRequest) -> None:
        """Let a request run with no other from now on."""
        waiting = list(active.waiting)
        self._take(active, waiting)
        active.exclusive = True
        if waiting:
            self.put_back(active, waiting)

    def longest(self, active: ActiveRequest) -> WaitingText:
        """Return the longest waiting text of a request."""
        return _waiting_text(active, next(iter(active.waiting)))

    def similar(
        self, text: WaitingText, active: ActiveRequest, num_each_side: int, num_requests: int
    ) -> tuple[list[WaitingText], int]:
        """Return the texts of the first `num_requests` that are nearest in length to a text of `active`, and its index.

        They are of its group, sorted by length, at most `num_each_side` of them before it and as many after it.
        """
        texts = self.groups[active.group]
        position = bisect_left(texts, text)
        pool = {each.request.attempt_id for each in islice(self.in_order(), num_requests)}
        shorter, longer = (
            list(islice((each for each in side if each.attempt_id in pool), num_each_side))
            for side in (reversed(texts[:position]), texts[position + 1 :])
        )
        return [*reversed(shorter), text, *longer], len(shorter)

    def take(self, texts: Iterable[WaitingText]) -> None:
        """Remove waiting texts that go into a batch."""
        for text in texts:
            self._take(self.requests[text.attempt_id], [text.text_index])

    def put_back(self, active: ActiveRequest, indices: Iterable[int]) -> None:
        """Let texts of a request wait, at least one: new ones or those of a batch that was not executed."""
        num_tokens = active.request.num_tokens
        if not active.waiting:
            insort(self._order, (active.rank, active.number, active))
        group = self.groups.setdefault(active.group, [])
        for index in indices:
            active.waiting[index] = None
            active.waiting_tokens += num_tokens[index]
            self.waiting_tokens[active.request.batch_key] += num_tokens[index]
            self.num_waiting += 1
            insort(group, _waiting_text(active, index))
        active.waiting = dict.fromkeys(sorted(active.waiting, key=lambda index: -num_tokens[index]))

    def remove(self, attempt_id: str) -> ActiveRequest:
        """Remove a request and return it."""
        active = self.requests.pop(attempt_id)
        self._take(active, list(active.waiting))
        return active

    def _take(self, active: ActiveRequest, indices: Iterable[int]) -> None:
        for index in indices:
            text = _waiting_text(active, index)
            group = self.groups[active.group]
            del group[bisect_left(group, text)]
            if not group:
                del self.groups[active.group]
            del active.waiting[index]
            active.waiting_tokens -= text.num_tokens
            self.waiting_tokens[active.request.batch_key] -= text.num_tokens
            self.num_waiting -= 1
            if not active.waiting:
                self._remove_from_order(active)

    def _remove_from_order(self, active: ActiveRequest) -> None:
        del self._order[bisect_left(self._order, (active.rank, active.number))]


def _waiting_text(active: ActiveRequest, index: int) -> WaitingText:
    return WaitingText(active.request.num_tokens[index], active.number, index, active.request.attempt_id)
