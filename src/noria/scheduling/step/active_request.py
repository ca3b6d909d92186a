"""What the scheduler keeps of a request that has not ended."""

from dataclasses import dataclass, field

from noria.scheduling.step.forecast import Forecast
from noria.scheduling.types import ItemId, RequestTimings, SchedulableRequest

Rank = tuple[float, int]
"""The policy's key, then a number that orders requests with equal keys by arrival."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that has not ended. The request table changes `waiting`, the predictor `rank` and `image_work_s`."""

    request: SchedulableRequest
    arrived_at: float
    undecoded: set[int]  # indices of images not yet decoded
    needs_encode: bool  # whether it has a start image, which is not encoded yet
    timings: RequestTimings = RequestTimings()  # of the image decoded last
    promised_forecast: Forecast = Forecast(0.0, 0.0)  # at admission, uncorrected
    priority_penalty: float = 0.0  # added to the policy's key, to rank it behind accepted deadlines that it would break
    waiting: list[int] = field(default_factory=list)  # indices of images without a slot, sorted
    rank: Rank = (0.0, 0)
    image_work_s: float = 0.0  # device time of one image in full batches, at a slowdown of 1

    @property
    def images(self) -> list[ItemId]:
        """Its images that are not yet decoded, in order."""
        return [ItemId(self.request.attempt_id, index) for index in sorted(self.undecoded)]

    @property
    def waiting_images(self) -> list[ItemId]:
        """Its images without a slot, in order."""
        return [ItemId(self.request.attempt_id, index) for index in self.waiting]
