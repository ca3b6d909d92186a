"""The state that the scheduler keeps of a request that has not ended."""

from dataclasses import dataclass, field

from noria.scheduling.shares.fair_shares import NO_TURN, Turn
from noria.scheduling.step.forecast import Forecast
from noria.scheduling.types import ItemId, RequestTimings, SchedulableRequest

Rank = tuple[float, float, int, int]
"""The policy's key, the virtual finish, a number that orders requests by arrival, and the index of the image."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that has not ended.

    The request table changes `waiting`, the waiting queue `number` and `ranks`, the predictor `image_work_s`.
    """

    request: SchedulableRequest
    arrived_at: float
    undecoded: set[int]  # indices of images not yet decoded
    needs_encode: bool  # whether it has a start image, which is not encoded yet
    timings: RequestTimings = RequestTimings()  # timings of the image decoded last
    promised_forecast: Forecast = Forecast(0.0, 0.0)  # at admission, uncorrected
    priority_penalty: float = 0.0  # added to the policy's key, to rank it behind accepted deadlines that it would break
    waiting: list[int] = field(default_factory=list)  # indices of images without a slot, sorted
    number: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)  # ranks of the waiting images, once they have one
    image_work_s: float = 0.0  # device time of one image in full batches, at a slowdown of 1
    turns: dict[int, Turn] = field(default_factory=dict)  # turns of images not yet decoded, if clients share fairly

    @property
    def images(self) -> list[ItemId]:
        """Its images that are not yet decoded, in order."""
        return [ItemId(self.request.attempt_id, index) for index in sorted(self.undecoded)]

    @property
    def first_rank(self) -> Rank:
        """The rank of the first of its waiting images; there is one."""
        return min(self.ranks.values())

    @property
    def last_rank(self) -> Rank:
        """The rank of the last of its waiting images; there is one."""
        return max(self.ranks.values())

    def call_work_s(self, index: int) -> float:
        """The time of one call of an image that has calls left, on an idle device."""
        turn, request = self.turn(index), self.request
        num_calls = request.num_calls - request.progress_of(index).call
        return request.weight * (turn.virtual_finish - turn.virtual_start) / num_calls

    def turn(self, index: int) -> Turn:
        """The turn of an image."""
        return self.turns.get(index, NO_TURN)
