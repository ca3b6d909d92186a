"""What an engine shows of its wheel, to those who follow it: one `WheelView` for every `Follow`, and the pictures beside it.

Called by the wheel's thread only, and cheap where nobody follows: of every turn a few numbers are kept. Waiting for pixels and packing
them is for the delivery (`cells.py`). Seconds named `now` are monotonic, as the scheduler's; `at` is Unix time.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from noria.engine.cells import Shown, Spun
from noria.engine.delivery import CODES
from noria.engine.executor import P, PreviewPixels
from noria.engine.loop import Ended, Happening, ImageReady, Turn
from noria.engine.rates import Rates
from noria.messages import Follow, WheelView
from noria.request import ImageRequest, request_id_of
from noria.scheduling.plans import End, ImageId, Plan, SeatedImage, WaitingRequest
from noria.scheduling.steps import StepScheduler
from noria.views import LeftView, RatesView, SeatView, TurnView, WaitingView

MOST_KEPT = 256  # turns, and images that left: a view is behind by a few, and who begins to watch sees the last seconds
MOST_WAITING = 64  # requests in a view: as many as anybody looks at
BETWEEN_VIEWS_S = 0.2  # the eye sees steps at this pace, and a view takes the wheel's time (a forecast)
MOST_BETWEEN_VIEWS_S = 1.0  # however long they take
_SHARE = 0.01  # of the wheel's time that views may take: 64 seats take 1.4 ms, with 256 in the queue 6 ms
_BETWEEN_RATES_S = 1.0
_PAUSED_S = 1.0  # without a step: two sizes that take turns have half a second each, and nobody is to see them blink
_PAUSED_TURNS = 2  # of others, besides: one alone may last longer than that
_INSTANT_S = 1e-6  # what rounding may make of no wait at all

F = TypeVar("F", bound=Hashable)
"""Whoever follows."""


@dataclass(slots=True)
class _Place:
    """Where an image sits, when it stepped, and its last picture."""

    slot: int
    look: int  # in which it was seen last, or would have been for the first time
    stepped: int  # the number of turns with steps when it made its last one, or boarded
    stepped_at: float  # when that was
    picture: PreviewPixels | None = None


@dataclass(slots=True)
class _Follower:
    asks: Follow | None  # what is not answered yet
    pictures: bool = False  # whether the last answer had some
    number: int = -1  # of the turn that was the last one then
    version: int = -1  # of what it was shown
    num_left: int = 0  # images that it was told have left


class Showing(Generic[F]):
    """One wheel, as it is followed."""

    def __init__(
        self, incarnation: str, scheduler: StepScheduler, request: Callable[[str], ImageRequest], now: float
    ) -> None:
        """`request` finds a request that has not ended by the id that the scheduler knows."""
        self._incarnation, self._scheduler, self._request = incarnation, scheduler, request
        self._rates = Rates(scheduler.num_slots, now)
        self._rated: tuple[float, RatesView | None] = (now, None)
        self._turns: deque[Spun] = deque(maxlen=MOST_KEPT)
        self._left: deque[LeftView] = deque(maxlen=MOST_KEPT)
        self._num_left = 0  # ever
        self._number = 0  # of the last turn
        self._num_stepping = 0  # of the turns, those with steps
        self._turning = False
        self._num_seated = 0  # in the turn
        self._last_turn_s = 0.0
        self._places: dict[ImageId, _Place] = {}
        self._followers: dict[F, _Follower] = {}
        self._version = 0  # another one whenever there is something new to see
        self._looks = 0  # views that were due to all who ask
        self._next = -math.inf  # when the next of them may be

    # Who follows.

    def follow(self, who: F, message: Follow) -> None:
        """It asks for a view. Before the last was answered, it asks anew: one answers both."""
        if message.seen is None or who not in self._followers:
            self._followers[who] = _Follower(message, num_left=self._num_left)
        self._followers[who].asks = message

    def leave(self, who: F) -> None:
        """It is gone."""
        self._followers.pop(who, None)

    # What happens.

    def about_to(self, plan: Plan, now: float) -> bool:
        """A turn begins; whether it is to have glimpses.

        That is when it will probably end with a view, and when somebody steps who was not seen in the last one: two shape classes
        that take turns must not be seen always the one and never the other. Who was shown the turn before asks for this one while it
        lasts.
        """
        self._turning = True
        for seat in plan.boards:
            self._places[seat.image] = _Place(seat.slot, self._looks, self._num_stepping, now)
        self._num_seated = len(self._places)
        if not any(self._wants_pictures(follower) for follower in self._followers.values()):
            return False
        if now + self._last_turn_s >= self._next:
            return True
        return any(self._places[step.image].look < self._looks for step in plan.steps)

    def _wants_pictures(self, follower: _Follower) -> bool:
        """Whether it does, or will have asked for them when the turn that begins is over."""
        if follower.asks is None:
            return follower.pictures and follower.number == self._number
        return follower.asks.pictures

    def happened(self, event: Happening[P], now: float) -> None:
        """Something became of a request."""
        self._version += 1
        if isinstance(event, ImageReady):
            self._rates.drew(now)
            self._leave(ImageId(event.prepared.request.request_id, event.index), "ok")
        elif isinstance(event, Ended):
            ended, times = event.event, event.event.times
            if ended.end is End.FINISHED:
                self._rates.served(times.queue_s + times.slot_s, now)
                return
            for index in range(event.prepared.request.num_images):
                self._leave(ImageId(ended.request_id, index), CODES[ended.end])

    def turned(self, turn: Turn, now: float, at: float) -> None:
        """A turn was carried out, and what came of it has happened."""
        plan, overflowed = turn.plan, turn.outcome.overflowed
        unseated = [seat for seat in plan.boards if overflowed == "boards" and seat.image in self._places]
        for seat in unseated:
            del self._places[seat.image]
        num_stepped = len(plan.steps) if overflowed not in ("boards", "steps") else 0
        if num_stepped:
            self._num_stepping += 1
            for step in plan.steps:
                if (place := self._places.get(step.image)) is not None:
                    place.stepped, place.stepped_at = self._num_stepping, now
        self._turning, self._number, self._version = False, self._number + 1, self._version + 1
        self._last_turn_s = turn.seconds
        self._rates.turned(turn.seconds, self._num_seated, num_stepped, now)
        view = TurnView(
            number=self._number,
            began_at=at - turn.seconds,
            seconds=turn.seconds,
            encode_s=0.0,  # these two are for who may wait for the device
            decode_s=0.0,
            num_boarded=len(plan.boards) - len(unseated),
            num_stepped=num_stepped,
            num_decoded=len(plan.decodes) if overflowed is None else 0,
        )
        self._turns.append(Spun(view, turn.outcome.spent))
        for picture in turn.glimpses:
            if (place := self._places.get(picture.image)) is not None:
                place.look, place.picture = self._looks + 1, picture

    def _leave(self, image: ImageId, outcome: str) -> None:
        place = self._places.pop(image, None)
        if place is not None:
            number = self._number + self._turning
            self._left.append(LeftView(number, place.slot, request_id_of(image.request_id), image.index, outcome))
            self._num_left += 1

    # What is shown.

    def wait_s(self, now: float) -> float | None:
        """How long until somebody has to be shown something, if nothing happens before; None: for ever."""
        waits = (self._wait_s(follower, now) for follower in self._followers.values() if follower.asks is not None)
        return min((wait for wait in waits if wait is not None), default=None)

    def _wait_s(self, follower: _Follower, now: float) -> float | None:
        if follower.asks is None or follower.asks.seen is None or follower.version != self._version:
            return max(self._next - now, 0.0)  # newcomers keep the pace too: they may come again and again
        fading = self._rates.any(self._rated[0])  # what was shown of the last minute holds no more a second later
        return max(self._rated[0] + _BETWEEN_RATES_S - now, 0.0) if fading else None

    def views(self, now: float, at: float) -> list[tuple[F, Shown]]:
        """The answers that are due, each to whom it is for."""
        due = [
            (who, follower, follower.asks)
            for who, follower in self._followers.items()
            if follower.asks is not None and (wait_s := self._wait_s(follower, now)) is not None and wait_s < _INSTANT_S
        ]
        if not due:
            return []
        self._looks, self._next = self._looks + 1, now + BETWEEN_VIEWS_S
        whole = self._view(now, at)
        places = sorted(self._places.values(), key=lambda place: place.slot)
        pictures = tuple((place.slot, place.picture) for place in places if place.picture is not None)
        shown = []
        for who, follower, asks in due:
            seen = asks.seen or 0
            view = msgspec.structs.replace(whole, left=_last(self._left, self._num_left - follower.num_left))
            turns = tuple(spun for spun in self._turns if spun.turn.number > seen)
            shown.append((who, Shown(view, turns, pictures if asks.pictures else ())))
            follower.asks, follower.pictures, follower.number = None, asks.pictures, self._number
            follower.version, follower.num_left = self._version, self._num_left
        return shown

    def took(self, seconds: float) -> None:
        """What the last views took of the wheel's time: the next ones come so much later that it stays a small share."""
        self._next += min(max(seconds / _SHARE, BETWEEN_VIEWS_S), MOST_BETWEEN_VIEWS_S) - BETWEEN_VIEWS_S

    def _view(self, now: float, at: float) -> WheelView:
        standing = self._scheduler.standing(now, MOST_WAITING)
        rated, rates = self._rated
        if rates is None or now - rated >= _BETWEEN_RATES_S - _INSTANT_S:
            rates = self._rates.view(now)
            self._rated = now, rates
        return WheelView(
            incarnation=self._incarnation,
            at=at,
            number=self._number,
            num_slots=self._scheduler.num_slots,
            seats=tuple(self._seat(each, now, at) for each in standing.seated),
            waiting=tuple(self._waiting(each, now, at) for each in standing.waiting),
            num_waiting=self._scheduler.num_waiting,
            drain_s=self._scheduler.drain_s,
            turns=(),
            left=(),
            rates=rates,
        )

    def _seat(self, each: SeatedImage, now: float, at: float) -> SeatView:
        request, ticket = self._request(each.image.request_id), each.ticket
        return SeatView(
            slot=each.slot,
            request_id=request_id_of(request.request_id),
            index=each.image.index,
            model=request.model,
            width_px=request.width_px,
            height_px=request.height_px,
            scheduler=request.scheduler,
            guidance_scale=request.guidance_scale,
            num_steps=request.num_steps,
            call=each.call,
            num_calls=ticket.num_calls,
            priority=request.priority,
            boarded_at=at + each.boarded - now,
            due_at=None if ticket.due is None else at + ticket.due - now,
            finish_at=at + each.finish_in_s,
            paused=self._is_paused(each.image, now),
        )

    def _is_paused(self, image: ImageId, now: float) -> bool:
        place = self._places.get(image)
        if place is None:
            return False
        return self._num_stepping - place.stepped >= _PAUSED_TURNS and now - place.stepped_at >= _PAUSED_S

    def _waiting(self, each: WaitingRequest, now: float, at: float) -> WaitingView:
        request, ticket = self._request(each.ticket.request_id), each.ticket
        return WaitingView(
            request_id=request_id_of(request.request_id),
            num_images=each.num_images,
            model=request.model,
            width_px=request.width_px,
            height_px=request.height_px,
            scheduler=request.scheduler,
            guidance_scale=request.guidance_scale,
            num_steps=request.num_steps,
            priority=request.priority,
            arrived_at=at + each.arrived - now,
            start_at=at + each.start_in_s,
            due_at=None if ticket.due is None else at + ticket.due - now,
        )


def _last(left: Iterable[LeftView], number: int) -> tuple[LeftView, ...]:
    return tuple(left)[-number:] if number else ()
