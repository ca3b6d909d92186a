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

    def of_table(self, table: RequestTable) -> float:
        """Device time of all that waits and of what is left of the running images."""
        seconds = 0.0
        for (batch_key, rows), work in table.waiting_work.items():
            call_s, decode_s = self._per_image(batch_key, rows)
            seconds += work.num_calls * call_s + work.num_images * decode_s
        for running in table.running.values():
            request = running.active.request
            _, decode_s = self._per_image(request.batch_key, request.rows)
            calls_s = self._calls_s(request, running.call)
            seconds += calls_s + running.calls_left / request.num_calls * decode_s
        return seconds + sum(num * self.costs.image_encode_s(batch_key) for batch_key, num in table.unencoded.items())

    def of_request(self, request: SchedulableRequest) -> float:
        """Device time of a request from its beginning."""
        encode_s = self.costs.image_encode_s(request.batch_key) if request.has_start_image else 0.0
        return request.num_images * self.of_image(request) + encode_s

    def of_image(self, request: SchedulableRequest) -> float:
        """Device time of one image of a request, without a start image."""
        _, decode_s = self._per_image(request.batch_key, request.rows)
        return self._calls_s(request, 0) + decode_s

    def _calls_s(self, request: SchedulableRequest, call: int) -> float:
        return sum([num * self._per_image(key, request.rows)[0] for key, num in request.calls_by_key(call)])

    def _per_image(self, batch_key: BatchKey, rows: int) -> tuple[float, float]:
        """Return the device time of an image's call, and of its decode."""
        batch_size = max(min(self.costs.rows_limit(batch_key) // rows, self.max_running), 1)
        call_s = self.costs.step_s(batch_key, batch_size * rows) / batch_size
        return call_s, self.costs.decode_s(batch_key, self.decode_batch) / self.decode_batch
