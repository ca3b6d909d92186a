"""The running requests of A1111's clients: the progress of the oldest, and interruption.

A1111 runs one request at a time, and its clients ask for "the" progress and interrupt "the" image. Here that is the
oldest running request that came to this front end by A1111's route and, with API keys, from the same key. A client
neither sees nor interrupts the requests of other keys.
"""

import asyncio
from dataclasses import dataclass

from noria.errors import RequestCancelled
from noria.frontend.access.quotas import ApiClient
from noria.frontend.engines.results import PreviewImage, ProgressUpdate, Update
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult


@dataclass(eq=False)
class A1111Task:
    """A request, from admission to its end."""

    admitted: AdmittedRequest
    generation: asyncio.Task[GenerationResult] | None = None
    progress: ProgressUpdate | None = None  # the latest
    preview: PreviewImage | None = None  # the latest
    interrupted: bool = False

    def update(self, update: Update) -> None:
        """Record the latest progress or preview."""
        match update:
            case ProgressUpdate():
                self.progress = update
            case PreviewImage():
                self.preview = update

    def interrupt(self) -> None:
        """Cancel the request; it ends at its next step."""
        self.interrupted = True
        if self.generation is not None:
            self.generation.cancel()


class A1111Tasks:
    """The tasks of one front end, in order of arrival."""

    def __init__(self, generation_service: GenerationService) -> None:
        self._generation_service = generation_service
        self._tasks: list[A1111Task] = []

    def of_client(self, api_client: ApiClient) -> list[A1111Task]:
        """Return the tasks of `api_client`, oldest first."""
        return [task for task in self._tasks if task.admitted.context.api_client is api_client]

    async def generate(self, admitted: AdmittedRequest) -> GenerationResult:
        """Generate the images; raises as `GenerationService.generate` does, and RequestCancelled when interrupted."""
        task = A1111Task(admitted)
        task.generation = asyncio.create_task(self._generation_service.generate(admitted, task.update))
        self._tasks.append(task)
        try:
            return await task.generation
        except asyncio.CancelledError:
            if task.interrupted:
                raise RequestCancelled("interrupted by POST /sdapi/v1/interrupt or /skip.") from None
            raise
        finally:
            self._tasks.remove(task)
