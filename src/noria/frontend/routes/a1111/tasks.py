"""The requests of A1111's clients that are being drawn: how far the first of them is, and an end to them on demand.

A1111 draws one request at a time and its clients ask for "the" progress, and interrupt "the" image. Here that is the request that has
been drawn for longest, of those that came to this front end by A1111's route and, where there are API keys, with the same key; nobody
else's requests are told of or ended.
"""

import asyncio
from dataclasses import dataclass

from noria.errors import RequestCancelled
from noria.frontend.engines.pool import PreviewImage, ProgressUpdate, Update
from noria.frontend.http.quotas import ApiClient
from noria.frontend.services.generation import AdmittedRequest, GenerationResult, GenerationService


@dataclass(eq=False)
class A1111Task:
    """One request, from its admission to its end."""

    admitted: AdmittedRequest
    generation: asyncio.Task[GenerationResult] | None = None
    progress: ProgressUpdate | None = None  # the last that was heard
    preview: PreviewImage | None = None  # likewise
    interrupted: bool = False

    def update(self, update: Update) -> None:
        """Keep what is last."""
        match update:
            case ProgressUpdate():
                self.progress = update
            case PreviewImage():
                self.preview = update

    def interrupt(self) -> None:
        """End it at its next step."""
        self.interrupted = True
        if self.generation is not None:
            self.generation.cancel()


class A1111Tasks:
    """Those of one front end, in the order of their arrival."""

    def __init__(self, generation_service: GenerationService) -> None:
        self._generation_service = generation_service
        self._tasks: list[A1111Task] = []

    def of_client(self, api_client: ApiClient) -> list[A1111Task]:
        """The caller's, from the one that has been drawn for longest."""
        return [task for task in self._tasks if task.admitted.api_client is api_client]

    async def generate(self, admitted: AdmittedRequest) -> GenerationResult:
        """The wish's files; raises as `Studio.draw` does, and RequestCancelled when it is interrupted."""
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
