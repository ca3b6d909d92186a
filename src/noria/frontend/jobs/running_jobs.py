"""The jobs of a front end while it runs: opened, executed, drained and closed with it."""

import asyncio
from collections.abc import Callable

from noria.config import JobsConfig
from noria.frontend.jobs.image_executor import GenerationJobExecutor
from noria.frontend.jobs.text_executor import TextJobExecutor
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.texts.encoding import EncodingService
from noria.jobs.service import JobService


class RunningJobs:
    """The jobs' service, between `start` and `stop`, and the executors of both kinds."""

    def __init__(
        self,
        generation_service: GenerationService,
        encoding_service: EncodingService,
        config: JobsConfig,
        open_service: Callable[[], JobService],
        num_frontends: Callable[[], int],
    ) -> None:
        self._generation_service, self._encoding_service, self._config = generation_service, encoding_service, config
        self._open_service, self._num_frontends = open_service, num_frontends
        self._started: JobService | None = None
        self.draining = asyncio.Event()  # ends the streams of events

    async def start(self) -> None:
        """Open the jobs and start to run them. Raises ConfigError."""
        self._started = opened = await asyncio.to_thread(self._open_service)
        concurrency, weight = self._config.concurrency, self._config.weight
        images = GenerationJobExecutor(
            self._generation_service, concurrency, self._num_frontends, weight, opened.start_image
        )
        await opened.start(images, TextJobExecutor(self._encoding_service, opened.text_files, concurrency, weight))

    def drain(self) -> None:
        """Claim no more jobs and end the streams of events, because the process is about to stop."""
        self.draining.set()
        if self._started is not None:
            self._started.drain()

    @property
    def outage(self) -> str | None:
        """Why jobs could not be stored or read, within the last minute."""
        return None if self._started is None else self._started.outage

    @property
    def service(self) -> JobService:
        """The jobs."""
        assert self._started is not None, "the routes are served between `start` and `stop`"
        return self._started
