"""Fair shares of the device: when it is whose turn, by weighted fair queueing.

A *virtual clock* runs by the work that is done, over the weights of the clients that have work. Work is the time that
it would take on an idle device. An image's *virtual finish* is its work over its client's weight, after the clock or,
if that is later, after the client's image before. So in this order each client advances at its share, however much the
others send; one that was idle starts at the clock. The numbers are fixed when a request arrives. (Demers, Keshav and
Shenker, 1989; but each image of a request has a number: with one for all, they would come due at once.)

Policies compare times, not virtual ones: so an image without a deadline gets the implicit one of its priority, but none
later than that of an image, of its priority or a lower one, whose virtual finish is later, and none earlier than that
of one of its priority whose virtual finish is earlier: a request can enter after one that arrived later. So among
equals the order is that of virtual finishes, each image is where it was when it entered, and with one client it is the
order in which requests entered.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.protocol.request import Priority
from noria.scheduling.policies import IMPLICIT_DEADLINE_S
from noria.scheduling.types import SchedulableRequest

_BEHIND: Mapping[Priority, tuple[Priority, ...]] = {
    "high": ("high", "normal", "low"),
    "normal": ("normal", "low"),
    "low": ("low",),
}


class Turn(NamedTuple):
    """The place of an image."""

    virtual_finish: float = 0.0
    deadline: float = math.inf  # not later than the implicit one of any image that goes behind it
    virtual_start: float = 0.0


NO_TURN = Turn()


@dataclass(slots=True)
class _Client:
    weight: float = 1.0
    num_images: int = 0  # that have not ended
    last_finish: float = 0.0  # virtual finish of the last image


@dataclass(slots=True)
class FairShares:
    """The clients that have work, and the turns of their images. A client without work is forgotten."""

    _clock: float = 0.0
    _clients: dict[str, _Client] = field(default_factory=dict)
    _weights: Counter[float] = field(default_factory=Counter)  # weights of the clients with work
    # Turns of the images without deadlines that have not ended, sorted.
    _turns: dict[Priority, list[Turn]] = field(default_factory=lambda: {priority: [] for priority in _BEHIND})

    @property
    def weight(self) -> float:
        """The weights of all clients that have work."""
        return sum([weight * num for weight, num in self._weights.items()])

    def num_images(self, client: str) -> int:
        """The images of a client that have not ended."""
        return self._clients[client].num_images if client in self._clients else 0

    def share_of(self, request: SchedulableRequest) -> float:
        """The weight of a request's client over those of all clients that have work, with itself."""
        client = self._clients.get(request.client)
        others = self.weight - (0.0 if client is None else client.weight)
        return request.weight / (others + request.weight)

    def advance(self, work_s: float) -> None:
        """Advance the clock after work that would have taken `work_s` on an idle device; some client has work."""
        self._clock += work_s / self.weight

    def enter(self, request: SchedulableRequest, alone_s: Mapping[int, float], arrived_at: float) -> dict[int, Turn]:
        """Return the turns of a request's images, each of which takes `alone_s` on an idle device."""
        client = self._clients.get(request.client)
        finish = self._clock if client is None else max(self._clock, client.last_finish)
        implicit = arrived_at - request.waited_s + IMPLICIT_DEADLINE_S[request.priority]
        # What has moved here from another engine, where no other client has work.
        keeps_its_age = request.waited_s > 0.0 and len(self._clients) == (client is not None)
        turns: dict[int, Turn] = {}
        for index in sorted(alone_s):
            start, finish = finish, finish + alone_s[index] / request.weight
            deadline = self._deadline_behind(request.priority, finish)
            if request.deadline is None:
                ahead = -math.inf if keeps_its_age else self._deadline_ahead(request.priority, finish)
                deadline = min(max(implicit, ahead), deadline)
            turns[index] = Turn(finish, deadline, start)
        self.restore(request, turns)
        return turns

    def _deadline_behind(self, priority: Priority, virtual_finish: float) -> float:
        """Return the earliest deadline of the next images behind one; infinity if there are none."""
        deadline = math.inf
        for each in _BEHIND[priority]:
            turns = self._turns[each]
            position = bisect_left(turns, (virtual_finish, math.inf))
            if position < len(turns):
                deadline = min(deadline, turns[position].deadline)
        return deadline

    def _deadline_ahead(self, priority: Priority, virtual_finish: float) -> float:
        """Return the deadline of the image of a priority ahead of one; minus infinity if there is none."""
        turns = self._turns[priority]
        position = bisect_left(turns, (virtual_finish, math.inf))
        return turns[position - 1].deadline if position else -math.inf

    def restore(self, request: SchedulableRequest, turns: Mapping[int, Turn]) -> None:
        """Count images that have entered, and have left again."""
        if not turns:
            return
        client = self._clients.setdefault(request.client, _Client())
        if client.num_images:
            self._count(client, -1)
        client.weight = request.weight
        client.num_images += len(turns)
        self._count(client, 1)
        for turn in turns.values():
            client.last_finish = max(client.last_finish, turn.virtual_finish)
            if request.deadline is None:
                insort(self._turns[request.priority], turn)

    def leave(self, request: SchedulableRequest, turns: Mapping[int, Turn], *, unused: bool = False) -> None:
        """Forget images that have ended; `unused` if they have had no time of the device, which is given back."""
        if not turns:
            return
        client = self._clients[request.client]
        client.num_images -= len(turns)
        if request.deadline is None:
            for turn in turns.values():
                sorted_turns = self._turns[request.priority]
                del sorted_turns[bisect_left(sorted_turns, turn)]
        if unused:  # wherever they are: else who cancels the oldest would be charged for what is offered, not served
            unused_s = sum([turn.virtual_finish - turn.virtual_start for turn in turns.values()])
            client.last_finish = max(client.last_finish - unused_s, self._clock)
        if not client.num_images:
            self._count(client, -1)
            del self._clients[request.client]
            if not self._clients:
                self._clock = 0.0

    def _count(self, client: _Client, sign: int) -> None:
        self._weights[client.weight] += sign
        if not self._weights[client.weight]:
            del self._weights[client.weight]
