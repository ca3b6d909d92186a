"""Between jobs and the studio: a wish as it is kept in the database, and how it is drawn when its turn has come."""

import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from noria.errors import DeadlineExceeded, EngineUnavailable
from noria.frontend.engine_link import Progress, Update
from noria.frontend.spans import describe
from noria.frontend.studio import Studio, Wish, on_behalf
from noria.jobs.records import JobRecord
from noria.jobs.runner import Drawn
from noria.observe import metrics
from noria.observe.traces import ACTIVE
from noria.request import ImageFormat, ImageRequest

_UNTOLD_SLOTS = 16  # until the engines have told


class KeptWish(Struct, frozen=True):
    """All that it takes to draw a wish again, to the same image: its defaults are filled in, its seed is drawn."""

    request: ImageRequest
    file_format: ImageFormat
    quality: int | None
    metadata: bool


def keep(wish: Wish) -> bytes:
    """`wish` as the database keeps it; its model is kept beside it."""
    request = msgspec.structs.replace(on_behalf(wish.request), watched=True)
    return msgspec.json.encode(KeptWish(request, wish.file_format, wish.quality, wish.metadata))


class StudioPainter:
    """Draws jobs in the studio, as any request is drawn; a `Painter`."""

    def __init__(
        self,
        studio: Studio,
        concurrency: int | Literal["auto"],
        num_frontends: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._studio, self._concurrency, self._num_frontends, self._clock = studio, concurrency, num_frontends, clock

    def serves(self) -> set[tuple[str, str]]:
        """The models that a ready engine serves."""
        link = self._studio.link
        return {(spec.name, spec.fingerprint) for spec in link.models.values()} if link.ready else set()

    def room(self) -> int:
        """As set; else twice what the engines seat, so that their scheduler has a choice, shared among the front ends."""
        if self._concurrency != "auto":
            return self._concurrency
        return math.ceil(2 * (self._studio.link.load.num_slots or _UNTOLD_SLOTS) / self._num_frontends)

    async def draw(self, record: JobRecord, tell: Callable[[bytes], None]) -> Drawn:
        """One job's files; raises NoriaError."""
        kept = msgspec.json.decode(record.request, type=KeptWish)
        spec = self._studio.link.models.get(record.model)
        if spec is None or spec.fingerprint != record.version:  # since it was claimed
            raise EngineUnavailable(f"model {record.model!r} of version {record.version} is no longer served.")
        describe(ACTIVE.get(), kept.request)
        request = self._in_time(record, kept.request)

        def watch(update: Update) -> None:
            if isinstance(update, Progress):
                tell(msgspec.json.encode(update))

        drawing = await self._studio.draw(Wish(request, spec, kept.file_format, kept.quality, kept.metadata), watch)
        timings = {**msgspec.structs.asdict(drawing.timings), "num_steps_run": drawing.num_steps_run}
        return Drawn(drawing.files, kept.file_format, timings)

    def _in_time(self, record: JobRecord, request: ImageRequest) -> ImageRequest:
        """Its deadline counts from its acceptance, however often it is drawn; without one a job waits as long as it takes."""
        if request.deadline_s is None:  # `request_timeout_s` is for those whom somebody waits for
            return msgspec.structs.replace(request, timeout_s=math.inf)
        left_s = record.created_at + request.deadline_s - self._clock()
        if left_s <= 0:
            metrics.DEADLINES_MISSED.labels(record.model).inc()
            raise DeadlineExceeded(f"not done {request.deadline_s:g} s after it was accepted.")
        return msgspec.structs.replace(request, deadline_s=left_s)
