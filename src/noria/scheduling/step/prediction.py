"""A forecast of the running images and the head of the queue, from which finishes of the images behind follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noria.scheduling.step.active_request import Rank
from noria.scheduling.step.forecast import Forecast
from noria.scheduling.types import ItemId

NOTHING_BEHIND: Rank = (math.inf, 0.0, 0, 0)
"""The end of the head if it is the whole queue."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Forecasts of the running images and the head of the queue, for one version of the request table."""

    version: int
    images: Mapping[ItemId, Forecast]
    requests: Mapping[str, Forecast]  # forecasts of the requests of those images
    end: Rank  # all waiting images with lower ranks are in the head
    # The work of the images behind the head:
    start_in_s: float  # when the first of them joins
    pace: float  # the device's time per second of `image_work_s`
    head_work_s: float  # work of the head's waiting images
    max_running: int  # images in slots

    def behind(self, work_s: float, image_work_s: float) -> Forecast:
        """Forecast an image behind the head with `work_s` of waiting work ahead of it.

        It joins when that work is done, and then has its share of the device.
        """
        start_in_s = self.start_in_s + self.pace * max(work_s - self.head_work_s, 0.0)
        return Forecast(start_in_s, start_in_s + self.pace * self.max_running * image_work_s)


def by_request(images: Mapping[ItemId, Forecast]) -> dict[str, Forecast]:
    """Return the first start and the last finish of each request."""
    requests: dict[str, Forecast] = {}
    for image, each in images.items():
        other = requests.get(image.attempt_id)
        if other is not None:
            each = Forecast(min(each.start_in_s, other.start_in_s), max(each.finish_in_s, other.finish_in_s))  # noqa: PLW2901
        requests[image.attempt_id] = each
    return requests
