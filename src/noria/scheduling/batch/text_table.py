"""The accepted requests and their texts, waiting or in a batch. Bookkeeping only: decides nothing."""

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from noria.protocol.request import Priority
from noria.scheduling.types import BatchKey, ItemId, RequestTimings, SchedulableRequest

_MAX_LOOKED_AT = 512  # texts on each side of a leader, where clients share fairly


class WaitingText(Struct, frozen=True, order=True):
    """A waiting text; sorts by length, then by arrival."""

    num_tokens: int
    number: int  # number of its request
    text_index: int
    attempt_id: str

    @property
    def row(self) -> ItemId:
        """Its identity in plans and events."""
        return ItemId(self.attempt_id, self.text_index)


class Group(Struct, frozen=True):
    """Texts that are selected together."""

    batch_key: BatchKey
    priority: Priority
    exclusive_id: str  # id of the exclusive request whose texts they are; else empty


class Rank(Struct, frozen=True, order=True):
    """The place of a part of a request; the lowest goes first."""

    key: float  # the policy's
    virtual_finish: float = 0.0  # among equal keys, where clients share fairly


class Place(NamedTuple):
    """The place of a request in the order: the rank of its next part, then its arrival, which no other has."""

    rank: Rank
    number: int
    active: "ActiveRequest"


class ActiveRequest(Struct, eq=False):
    """A request that has not ended."""

    request: SchedulableRequest
    arrived_at: float
    number: int  # in order of arrival
    ranks: tuple[Rank, ...]  # ranks of its parts, each of `part_texts` texts, the longest first
    part_texts: int
    group: Group  # where its texts wait
    exclusive: bool  # runs with no other request
    unfinished: set[int]  # indices of texts not yet done
    waiting: dict[int, None] = {}  # indices of texts, the longest first
    waiting_tokens: int = 0
    predicted_s: float = 0.0  # its duration as predicted at admission
    promised_s: float = 0.0  # its duration as predicted at admission, uncorrected; 0 if it did not have to wait
    penalty: float = 0.0  # added to the keys of its ranks
    place: Place | None = None  # while it has waiting texts
    is_late: bool = False  # it cannot meet its deadline any more, and is ranked behind all others
    timings: RequestTimings = RequestTimings()  # timings of the text finished last

    @property
    def rank(self) -> Rank:
        """The rank of its next part."""
        rank = self.ranks[(self.request.num_images - len(self.waiting)) // self.part_texts]
        return Rank(rank.key + self.penalty, rank.virtual_finish) if self.penalty else rank

    @property
    def num_begun_parts(self) -> int:
        """Parts of which a text is not waiting."""
        return -(-(self.request.num_images - len(self.waiting)) // self.part_texts)

    @property
    def deadline(self) -> float:
        """Its deadline, in monotonic seconds; infinity if it has none."""
        return math.inf if self.request.deadline is None else self.request.deadline

    @property
    def longest(self) -> int:
        """Tokens of its longest waiting text; it must have one."""
        return self.request.num_tokens[next(iter(self.waiting))]


@dataclass(slots=True)
class TextTable:
    """Requests by id, those with waiting texts in the policy's order, and waiting texts by length."""

    requests: dict[str, ActiveRequest] = field(default_factory=dict)
    groups: dict[Group, list[WaitingText]] = field(default_factory=dict)  # each sorted; none is empty
    num_waiting: int = 0
    waiting_tokens: Counter[BatchKey] = field(default_factory=Counter)
    waiting_by_client: Counter[str] = field(default_factory=Counter)
    # The parts of `waiting_tokens`.
    tokens_by_client: dict[str, defaultdict[BatchKey, int]] = field(default_factory=dict)
    _order: list[Place] = field(default_factory=list)  # sorted
    _num_added: int = 0

    def add(
        self, request: SchedulableRequest, arrived_at: float, ranks: tuple[Rank, ...], part_texts: int
    ) -> ActiveRequest:
        """Add a request with the ranks of its parts, each of `part_texts` texts; all its texts wait."""
        self._num_added += 1
        indices = range(request.num_images)
        group = _group(request, exclusive=request.exclusive)
        active = ActiveRequest(
            request, arrived_at, self._num_added, ranks, part_texts, group, request.exclusive, set(indices)
        )
        self.requests[request.attempt_id] = active
        self.put_back(active, indices)
        return active

    def in_order(self) -> Iterable[ActiveRequest]:
        """Requests with waiting texts, the first one first. Do not change the table while iterating."""
        return (place.active for place in self._order)

    def in_reverse_order(self) -> Iterable[ActiveRequest]:
        """Iterate as `in_order`, the last one first."""
        return (place.active for place in reversed(self._order))

    def behind(self, active: ActiveRequest) -> Iterable[ActiveRequest]:
        """Requests with waiting texts that come after `active`, which has some."""
        assert active.place is not None
        position = bisect_left(self._order, active.place) + 1
        return [place.active for place in self._order[position:]] if position < len(self._order) else ()

    def first(self) -> ActiveRequest | None:
        """Return the first request with waiting texts."""
        return self._order[0].active if self._order else None

    def postpone(self, active: ActiveRequest, seconds: float) -> None:
        """Add `seconds` to the keys of a request with waiting texts."""
        active.penalty += seconds
        self._place(active)

    def make_exclusive(self, active: ActiveRequest) -> None:
        """Let a request run with no other from now on."""
        waiting = list(active.waiting)
        self._take_all(active)
        active.exclusive, active.group = True, _group(active.request, exclusive=True)
        if waiting:
            self.put_back(active, waiting)

    def longest(self, active: ActiveRequest) -> WaitingText:
        """Return the longest waiting text of a request."""
        return _waiting_text(active, next(iter(active.waiting)))

    def similar(
        self,
        text: WaitingText,
        active: ActiveRequest,
        num_each_side: int,
        num_requests: int,
        max_of_other: int | None = None,
    ) -> tuple[list[WaitingText], int]:
        """Return the texts of the first `num_requests` that are nearest in length to a text of `active`, and its index.

        They are of its group, sorted by length, at most `num_each_side` of them before it and as many after it, and on
        each side at most `max_of_other` of another client (None: any number).
        """
        texts = self.groups[active.group]
        position = bisect_left(texts, text)
        pool = {place.active.request.attempt_id for place in self._order[:num_requests]}
        shorter, longer = (
            list(islice(self._of_pool(side, pool, active.request.client, max_of_other), num_each_side))
            for side in (reversed(texts[:position]), texts[position + 1 :])
        )
        return [*reversed(shorter), text, *longer], len(shorter)

    def in_turn(
        self, active: ActiveRequest, num_texts: int, num_requests: int, max_of_other: int | None = None
    ) -> list[WaitingText]:
        """Return the first waiting texts of the group of `active`, the first request, in the policy's order.

        They are of the first `num_requests`, of each the longest first, at most `num_texts`, and at most `max_of_other`
        of another client (None: any number).
        """
        texts: list[WaitingText] = []
        num_by_client: Counter[str] = Counter()
        for place in self._order[:num_requests]:
            other, room = place.active, num_texts - len(texts)
            client = other.request.client
            if max_of_other is not None and client != active.request.client:
                room = min(room, max_of_other - num_by_client[client])
            if other.group == active.group:
                chosen = [_waiting_text(other, index) for index in islice(other.waiting, room)]
                num_by_client[client] += len(chosen)
                texts += chosen
        return texts

    def _of_pool(
        self, side: Iterable[WaitingText], pool: Container[str], own: str, max_of_other: int | None
    ) -> Iterator[WaitingText]:
        if max_of_other is None:
            yield from (each for each in side if each.attempt_id in pool)
            return
        num_by_client: Counter[str] = Counter()
        for each in islice(side, _MAX_LOOKED_AT):
            client = self.requests[each.attempt_id].request.client
            if each.attempt_id in pool and (client == own or num_by_client[client] < max_of_other):
                num_by_client[client] += 1
                yield each

    def take(self, texts: Iterable[WaitingText]) -> None:
        """Remove waiting texts that go into a batch."""
        for text in texts:
            self._take(active := self.requests[text.attempt_id], text)
            if active.place is not None and active.place.rank != active.rank:  # its next part begins
                self._place(active)

    def put_back(self, active: ActiveRequest, indices: Iterable[int]) -> None:
        """Let texts of a request wait, at least one: new ones or those of a batch that was not executed."""
        num_tokens, batch_key, client = active.request.num_tokens, active.request.batch_key, active.request.client
        own_tokens = self.tokens_by_client.setdefault(client, defaultdict(int))
        group = self.groups.setdefault(active.group, [])
        for index in indices:
            active.waiting[index] = None
            active.waiting_tokens += num_tokens[index]
            self.waiting_tokens[batch_key] += num_tokens[index]
            own_tokens[batch_key] += num_tokens[index]
            self.num_waiting += 1
            self.waiting_by_client[client] += 1
            insort(group, _waiting_text(active, index))
        self._place(active)
        if len(active.waiting) > 1:
            active.waiting = dict.fromkeys(sorted(active.waiting, key=lambda index: -num_tokens[index]))

    def remove(self, attempt_id: str) -> ActiveRequest:
        """Remove a request and return it."""
        active = self.requests.pop(attempt_id)
        self._take_all(active)
        return active

    def _take_all(self, active: ActiveRequest) -> None:
        for index in list(active.waiting):
            self._take(active, _waiting_text(active, index))

    def _take(self, active: ActiveRequest, text: WaitingText) -> None:
        group = self.groups[active.group]
        del group[bisect_left(group, text)]
        if not group:
            del self.groups[active.group]
        del active.waiting[text.text_index]
        active.waiting_tokens -= text.num_tokens
        batch_key, client = active.request.batch_key, active.request.client
        self.waiting_tokens[batch_key] -= text.num_tokens
        own_tokens = self.tokens_by_client[client]
        own_tokens[batch_key] -= text.num_tokens
        if not own_tokens[batch_key]:
            del own_tokens[batch_key]
        self.num_waiting -= 1
        self.waiting_by_client[client] -= 1
        if not self.waiting_by_client[client]:
            del self.waiting_by_client[client], self.tokens_by_client[client]
        if not active.waiting:
            self._place(active)

    def _place(self, active: ActiveRequest) -> None:
        """Put a request where its rank says, if it has waiting texts."""
        if active.place is not None:
            del self._order[bisect_left(self._order, active.place)]
        active.place = Place(active.rank, active.number, active) if active.waiting else None
        if active.place is not None:
            insort(self._order, active.place)


def _group(request: SchedulableRequest, *, exclusive: bool) -> Group:
    return Group(request.batch_key, request.priority, request.attempt_id if exclusive else "")


def _waiting_text(active: ActiveRequest, index: int) -> WaitingText:
    return WaitingText(active.request.num_tokens[index], active.number, index, active.request.attempt_id)
