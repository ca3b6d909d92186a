"""What is to be expected: in which order images go, when each request will be done, how long the work lasts, and who must be refused.

Reads the crowd and the cost model; changes neither the crowd nor time. Learns two things of its own: the *company*, the rows that a
turn usually has, and the *bias*, by which finished requests took longer than was promised.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from noria.scheduling.costs import CostModel
from noria.scheduling.crowd import Accepted, Crowd
from noria.scheduling.forecast import Expected, Forecast, forecast
from noria.scheduling.plans import End, ImageId, RequestEnded, ShapeClass, Ticket
from noria.scheduling.policies import Candidate, Policy

_COMPANY_TURNS = 30.0  # over which the usual company is averaged
_BIAS_WEIGHT = 0.05  # of one finished request


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

    # Order.

    def in_order(self, images: Iterable[ImageId], now: float) -> list[ImageId]:
        """`images` as the policy has them go; those of one request, and equals, in the order given."""
        keys: dict[tuple[str, int], float] = {}

        def key(image: ImageId) -> float:
            place = image.request_id, self.crowd.call(image)
            if place not in keys:
                keys[place] = self.policy(self._candidate(*place), now)
            return keys[place]

        return sorted(images, key=key)

    def expected(self, image: ImageId) -> Expected:
        """`image` as a forecast takes it."""
        ticket = self.crowd.ticket(image)
        return Expected(image, ticket.shape, ticket.rows, ticket.num_calls - self.crowd.call(image))

    def _candidate(self, request_id: str, call: int) -> Candidate:
        accepted = self.crowd.requests[request_id]
        ticket = accepted.ticket
        usual = min(round(self._company.get(ticket.shape, 0.0)), self.costs.rows_limit(ticket.shape))
        calls, decode_s = ticket.num_calls - call, self.costs.decode_s(ticket.shape)
        usual_s = self.costs.step_s(ticket.shape, max(usual, ticket.rows))
        least_s = min(self.costs.step_s(ticket.shape, ticket.rows), usual_s)
        remaining_s, alone_s = calls * usual_s + decode_s, calls * least_s + decode_s
        return Candidate(accepted.submitted, ticket.due, ticket.priority, remaining_s, alone_s)

    # Forecasts.

    def requests(self, now: float) -> dict[str, Forecast]:
        """Each request's first start and last finish, in seconds from now."""
        return {
            request_id: Forecast(self._bias * each.start_in_s, self._bias * each.finish_in_s)
            for request_id, each in self.uncorrected(now).items()
        }

    def uncorrected(self, now: float) -> dict[str, Forecast]:
        """The same as the cost model has it, without what was learned of its errors."""
        images = forecast(
            [self.expected(image) for image in self.in_order(self.crowd.seated, now)],
            [self.expected(image) for image in self.in_order(self.crowd.waiting, now)],
            self.most_seated,
            self.costs,
            self._company,
            self.decode_batch,
        )
        found: dict[str, Forecast] = {}
        for image, each in images.items():
            other = found.get(image.request_id, each)
            starts, finishes = (each.start_in_s, other.start_in_s), (each.finish_in_s, other.finish_in_s)
            found[image.request_id] = Forecast(min(starts), max(finishes))
        return found

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

    def refuse_for_deadline(
        self, newcomer: Accepted, before: Mapping[str, Forecast], after: Mapping[str, Forecast], now: float
    ) -> RequestEnded | None:
        """`newcomer`, who has entered the crowd, would be late, or would make late whom it was promised `before`."""
        ticket = newcomer.ticket
        if ticket.due is None:
            return None
        left_s, finish_s = ticket.due - now, after[ticket.request_id].finish_in_s
        if finish_s > left_s:
            alone_s = self._bias * self._candidate(ticket.request_id, 0).least_s
            words = f"it would be done in {finish_s:.2f} s, {left_s:.2f} s are left"
            if alone_s > left_s:
                words += f"; even with nobody else here it takes {alone_s:.2f} s"
                return RequestEnded(ticket.request_id, End.UNMEETABLE, words)
            return RequestEnded(ticket.request_id, End.UNMEETABLE, words, retry_after_s=finish_s - left_s)
        for request_id, earlier in before.items():
            due = self.crowd.requests[request_id].ticket.due
            if due is not None and earlier.finish_in_s <= due - now < after[request_id].finish_in_s:
                words = "it could be in time only by making another late, which was accepted before"
                return RequestEnded(ticket.request_id, End.UNMEETABLE, words, retry_after_s=due - now)
        return None

    # Learning.

    def stepped(self, shape: ShapeClass, rows: int, seconds: float, now: float) -> None:
        """A turn ended `now` that took `seconds`."""
        self._last_turn = now, seconds
        self._company[shape] = (1 - 1 / _COMPANY_TURNS) * self._company.get(shape, 0.0) + rows / _COMPANY_TURNS

    def stood_still(self, now: float) -> None:
        """Nobody was here since the last turn: the usual company fades."""
        ended, seconds = self._last_turn
        kept = math.exp(-max(now - ended, 0.0) / (_COMPANY_TURNS * seconds)) if seconds > 0.0 else 1.0
        self._company = {shape: rows * kept for shape, rows in self._company.items()}

    def finished(self, accepted: Accepted, now: float) -> None:
        """A request is done, about which something was promised."""
        if accepted.promised.finish_in_s > 0.0:
            ratio = (now - accepted.submitted) / accepted.promised.finish_in_s
            self._bias += _BIAS_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._bias)
