"""The device's time that requests take in full batches: what is queued is the sum of it."""

from typing import NamedTuple

from noria.scheduling.costs import CostModel
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, SchedulableRequest


class DeviceTime(NamedTuple):
    """Seconds by the cost model, with at most `max_running` images in a batch."""

    costs: CostModel
    max_running: int
    decode_batch: int

    def of_table(self, table: RequestTable, client: str | None = None) -> float:
        """Device time of all that waits and of what is left of the running images, or of a client's part of it."""
        seconds = 0.0
        works = table.waiting_work if client is None else table.work_by_client.get(client, {})
        for (batch_key, rows), work in works.items():
            call_s, decode_s = self._per_image(batch_key, rows)
            encodes_s = work.num_encodes * self.costs.image_encode_s(batch_key) if work.num_encodes else 0.0
            seconds += work.num_calls * call_s + work.num_images * decode_s + encodes_s
        for running in table.running.values():
            if client not in (None, running.client):
                continue
            request = running.active.request
            _, decode_s = self._per_image(request.last_key, request.rows)
            calls_s = self._calls_s(request, running.call)
            seconds += calls_s + running.calls_left / request.num_calls * decode_s
        return seconds

    def of_request(self, request: SchedulableRequest) -> float:
        """Device time of a request from its beginning."""
        encode_s = self.costs.image_encode_s(request.batch_key) if request.has_start_image else 0.0
        return request.num_images * self.of_image(request) + encode_s

    def of_image(self, request: SchedulableRequest, call: int = 0, num_images: int | None = None) -> float:
        """Device time of an image of a request from `call` on, without a start image, beside others of equal costs.

        They are `num_images` in all; None: as many as pay off together.
        """
        _, decode_s = self._per_image(request.last_key, request.rows, num_images)
        return self._calls_s(request, call, num_images) + decode_s

    def _calls_s(self, request: SchedulableRequest, call: int, num_images: int | None = None) -> float:
        calls = request.calls_by_key(call)
        return sum([num * self._per_image(key, request.rows, num_images)[0] for key, num in calls])

    def _per_image(self, batch_key: BatchKey, rows: int, num_images: int | None = None) -> tuple[float, float]:
        """Return the device time of an image's call, and of its decode."""
        batch_size = max(min(self.costs.rows_limit(batch_key) // rows, self.max_running, num_images or 2**31), 1)
        call_s = self.costs.step_s(batch_key, batch_size * rows) / batch_size
        return call_s, self.costs.decode_s(batch_key, self.decode_batch) / self.decode_batch
