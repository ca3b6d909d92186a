"""An executor of jobs without an engine."""

import asyncio

from noria.jobs.worker import JobOutput


class FakeExecutor:
    """Raises `errors` one after the other; then awaits `behaviour(record, report_progress)`, if given, and succeeds."""

    def __init__(self, *errors, behaviour=None, capacity=4, models=frozenset({("shapes", "v1")})):
        self.errors, self.behaviour, self._capacity, self._models = list(errors), behaviour, capacity, models
        self.num_running, self.max_running, self.cancelled = 0, 0, []

    def available_models(self):
        return set(self._models)

    def capacity(self):
        return self._capacity

    async def execute(self, record, report_progress, log_record):
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            if self.errors:
                raise self.errors.pop(0)
            if self.behaviour is not None:
                await self.behaviour(record, report_progress)
        except asyncio.CancelledError:
            self.cancelled.append(record.id)
            raise
        finally:
            self.num_running -= 1
        return JobOutput([f"made from {record.request}".encode()], "png", {"denoise_s": 0.1})
