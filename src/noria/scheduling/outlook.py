"""What is to be expected: in which order images go, when each request will be done, how long the work lasts, and who must be refused.

Reads the crowd and the cost model; changes neither the crowd nor time. Learns two things of its own: the *company*, the rows that a
turn usually has, and the *bias*, by which finished requests took longer than was promised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from noria.scheduling.costs import CostModel
from noria.scheduling.crowd import Accepted, Crowd
from noria.scheduling.forecast import Expected, Forecast, forecast
from noria.scheduling.plans import End, ImageId, RequestEnded, ShapeClass, Ticket
from noria.scheduling.policies import DOUBT, Candidate, Policy, heeds_deadlines

_COMPANY_TURNS = 30.0  # over which the usual company is averaged
_BIAS_WEIGHT = 0.05  # of one finished request
_INSTANT_S = 1e-6  # what rounding may make of no delay at all


class _Rates(NamedTuple):
    """Of one image of a kind, in seconds."""

    usual_s: float  # a call, in the usual company
    least_s: float  # a call, alone
    decode_s: float


@dataclass(frozen=True, slots=True)
class _View:
    """What was foreseen as of one version of the crowd."""

    version: int
    images: Mapping[ImageId, Forecast]
    forecasts: Mapping[str, Forecast]
    places: Mapping[ImageId, int]


@dataclass(slots=True)
class Outlook:
    """`most_seated` may be lowered when boarding did not fit the memory."""

    crowd: Crowd
    costs: CostModel
    policy: Policy
    most_seated: int
    decode_batch: int
    _company: dict[ShapeClass, float] = field(init=False, default_factory=dict)
    _last_turn: tuple[float, float] = field(init=False, default=(0.0, 0.0))  # when it ended, how long it took
    _bias: float = field(init=False, default=1.0)
    _view: _View = field(init=False, default=_View(-1, {}, {}, {}))

    # Order.

    def in_order(self, images: Iterable[ImageId], now: float) -> list[ImageId]:
        """`images` as the policy has them go; those of one request, and equals, in the order given."""
        keys: dict[tuple[str, int], float] = {}
        rates: dict[tuple[ShapeClass, int], _Rates] = {}
        call = self.crowd.call

        def key(image: ImageId) -> float:
            place = image.request_id, call(image)
            if place not in keys:
                keys[place] = self._key(*place, rates, now)
            return keys[place]

        return sorted(images, key=key)

    def expected(self, image: ImageId, now: float) -> Expected:
        """`image` as a forecast takes it."""
        ticket, seated = self.crowd.ticket(image), self.crowd.seated.get(image)
        due_s = ticket.due - now if ticket.due is not None and heeds_deadlines(self.policy) else None
        if seated is None:
            return Expected(image, ticket.shape, ticket.rows, ticket.num_calls, alone=ticket.alone, due_s=due_s)
        calls = ticket.num_calls - seated.call
        return Expected(image, ticket.shape, ticket.rows, calls, True, ticket.alone, due_s)

    def _key(self, request_id: str, call: int, rates: dict[tuple[ShapeClass, int], _Rates], now: float) -> float:
        accepted = self.crowd.requests[request_id]
        ticket = accepted.ticket
        kind = ticket.shape, ticket.rows
        if kind not in rates:
            rates[kind] = self._rates(*kind)
        usual_s, least_s, decode_s = rates[kind]
        calls = ticket.num_calls - call
        candidate = Candidate(
            accepted.submitted, ticket.due, ticket.priority, calls * usual_s + decode_s, calls * least_s + decode_s
        )
        return self.policy(candidate, now) + accepted.behind

    def _rates(self, shape: ShapeClass, rows: int) -> _Rates:
        """What a call takes an image, in the usual company and alone, and what decoding it takes."""
        usual = min(round(self._company.get(shape, 0.0)), self.costs.rows_limit(shape))
        usual_s = self.costs.step_s(shape, max(usual, rows))
        return _Rates(usual_s, min(self.costs.step_s(shape, rows), usual_s), self.costs.decode_s(shape))

    def put_behind(self, newcomer: Accepted, late: Iterable[str], now: float) -> None:
        """Have `newcomer` go after those whom it would make `late`."""
        promised = [image for request_id in late for image in self.crowd.requests[request_id].images]
        rates: dict[tuple[ShapeClass, int], _Rates] = {}
        last = max(self._key(image.request_id, self.crowd.call(image), rates, now) for image in promised)
        newcomer.behind = max(last + _INSTANT_S - self._key(newcomer.ticket.request_id, 0, rates, now), 0.0)
        self.crowd.changed()

    # Forecasts.

    def requests(self, now: float) -> dict[str, Forecast]:
        """Each request's first start and last finish, in seconds from now."""
        return {request_id: self._corrected(each) for request_id, each in self.uncorrected(now).items()}

    def images(self, now: float) -> dict[ImageId, Forecast]:
        """The same of each image."""
        return {image: self._corrected(each) for image, each in self._look(now).images.items()}

    def _corrected(self, each: Forecast) -> Forecast:
        return Forecast(self._bias * each.start_in_s, self._bias * each.finish_in_s)

    def uncorrected(self, now: float) -> Mapping[str, Forecast]:
        """The same as the cost model has it, without what was learned of its errors."""
        return self._look(now).forecasts

    def places(self, now: float) -> Mapping[ImageId, int]:
        """The waiting images, and how many board before each."""
        return self._look(now).places

    def _look(self, now: float) -> _View:
        """Ahead; what was seen holds as long as nothing changes but time, since what was foreseen starts only when the wheel turns."""
        if self._view.version == self.crowd.version:
            return self._view
        in_order = self.in_order((*self.crowd.seated, *self.crowd.waiting), now)
        expected = [self.expected(image, now) for image in in_order]
        waiting = [each.image for each in expected if not each.seated]
        images = forecast(expected, self.most_seated, self.costs, self._company, self.decode_batch)
        found: dict[str, Forecast] = {}
        for image, each in images.items():
            other = found.get(image.request_id)
            if other is None:
                found[image.request_id] = each
            else:
                starts, finishes = (each.start_in_s, other.start_in_s), (each.finish_in_s, other.finish_in_s)
                found[image.request_id] = Forecast(min(starts), max(finishes))
        self._view = _View(self.crowd.version, images, found, {image: place for place, image in enumerate(waiting)})
        return self._view

    def _alone_s(self, ticket: Ticket) -> float:
        """How long the request would take if nobody else were here, nor usual."""
        images = [
            Expected(ImageId(ticket.request_id, index), ticket.shape, ticket.rows, ticket.num_calls)
            for index in range(ticket.num_images)
        ]
        done = forecast(images, self.most_seated, self.costs, {}, self.decode_batch)
        return max(each.finish_in_s for each in done.values())

    @property
    def drain_s(self) -> float:
        """How long everything that was accepted takes, if nobody else comes."""
        return sum(self._work_s(r.ticket, self.crowd.calls_left(name)) for name, r in self.crowd.requests.items())

    def _work_s(self, ticket: Ticket, calls: int) -> float:
        """What `calls` calls of a request take off the device, in full batches."""
        together = max(min(self.costs.rows_limit(ticket.shape) // ticket.rows, self.most_seated), 1)
        decodes = calls / ticket.num_calls * self.costs.decode_s(ticket.shape, self.decode_batch) / self.decode_batch
        return self._bias * (calls * self.costs.step_s(ticket.shape, together * ticket.rows) / together + decodes)

    # Refusals: what a newcomer is told, or None.

    def refuse_for_length(self, ticket: Ticket, limit_s: float) -> RequestEnded | None:
        """The queue would hold more than `limit_s` of work; to an empty queue anybody may come."""
        if not self.crowd.waiting or math.isinf(limit_s):
            return None
        drain_s, added_s = self.drain_s, self._work_s(ticket, ticket.num_calls * ticket.num_images)
        if drain_s + added_s <= limit_s:
            return None
        words = f"the queue is full: {drain_s:.1f} s of work are ahead, {limit_s:g} s may be; this request is {added_s:.1f} s more"
        wait_s = min(drain_s + added_s - limit_s, drain_s)  # until it fits, or until nobody waits
        return RequestEnded(ticket.request_id, End.REFUSED, words, retry_after_s=wait_s)

    def refuse_for_deadline(self, ticket: Ticket, late: Sequence[str], now: float) -> RequestEnded | None:
        """The newcomer, who has entered the crowd, would be late, or would make others `late`."""
        if ticket.due is None:
            return None
        left_s, finish_s = ticket.due - now, self._finish_s(ticket.request_id, now)
        if finish_s > left_s:
            alone_s = self._alone_s(ticket)
            words = f"it would be done in {finish_s:.2f} s, {max(left_s, 0.0):.2f} s are left"
            if alone_s > left_s:
                words += f"; even with nobody else here it takes {alone_s:.2f} s"
                return RequestEnded(ticket.request_id, End.UNMEETABLE, words)
            return RequestEnded(ticket.request_id, End.UNMEETABLE, words, retry_after_s=finish_s - left_s)
        if late:
            words = "it could be in time only by making another late, which was accepted before"
            wait_s = max(self._left_s(request_id, now) for request_id in late)
            return RequestEnded(ticket.request_id, End.UNMEETABLE, words, retry_after_s=wait_s)
        return None

    def made_late_by(self, newcomer: Accepted, now: float) -> list[str]:
        """Who was promised a time that could be kept before `newcomer` entered, and cannot be now; in doubt, it could."""
        own_id = newcomer.ticket.request_id
        finishes_s = {name: self._finish_s(name, now) for name in self.crowd.requests if name != own_id}
        late = {name: each for name, each in finishes_s.items() if each > self._left_s(name, now)}
        if not late:
            return []
        seen = self._view
        self.crowd.leave(own_id)
        earlier = {name: self._finish_s(name, now) for name in late}
        self.crowd.enter_again(newcomer)
        self._view = replace(seen, version=self.crowd.version)
        return [
            name
            for name, before_s in earlier.items()
            if before_s + _INSTANT_S < late[name] and DOUBT * before_s <= self._left_s(name, now)
        ]

    def _finish_s(self, request_id: str, now: float) -> float:
        """As promises reckon, without the bias: that those without a deadline were late is because others are kept."""
        return self.uncorrected(now)[request_id].finish_in_s

    def _left_s(self, request_id: str, now: float) -> float:
        due = self.crowd.requests[request_id].ticket.due
        return math.inf if due is None else due - now

    # Learning.

    def stepped(self, shape: ShapeClass, rows: int, seconds: float, now: float) -> None:
        """A turn ended `now` that took `seconds`; classes that have nobody here are on their way to be forgotten."""
        self._last_turn = now, seconds
        here = {seated.ticket.shape for seated in self.crowd.seated.values()} - {shape}
        for other, usual in self._company.items():
            self._company[other] = usual if other in here else (1 - 1 / _COMPANY_TURNS) * usual
        self._company[shape] = self._company.get(shape, 0.0) + rows / _COMPANY_TURNS

    def stood_still(self, now: float) -> None:
        """Nobody was here since the last turn: the usual company fades."""
        ended, seconds = self._last_turn
        self.costs.rest(now - ended if seconds > 0.0 else 0.0)
        kept = math.exp(-max(now - ended, 0.0) / (_COMPANY_TURNS * seconds)) if seconds > 0.0 else 1.0
        self._company = {shape: rows * kept for shape, rows in self._company.items()}
        self._last_turn = now, seconds

    def finished(self, accepted: Accepted, now: float) -> None:
        """A request is done, about which something was promised."""
        if accepted.promised.finish_in_s > 0.0:
            ratio = (now - accepted.submitted) / accepted.promised.finish_in_s
            self._bias += _BIAS_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._bias)
