"""The result that an engine makes of a request, and what it sends meanwhile: images, previews, progress."""

from collections.abc import Callable

from msgspec import Struct

from noria.protocol.kinds import FinalResult
from noria.protocol.messages import AnyTimings


class RawImage(Struct, frozen=True):
    """An image as the engine sent it. `rgb` is height × width × 3 bytes."""

    seed: int
    width_px: int
    height_px: int
    rgb: memoryview
    num_truncated_tokens: int = 0  # at the ends of its prompts
    safety_score: float | None = None  # None: its model has no safety classifier
    is_refused: bool = False  # by the classifier: it has no pixels


class EngineResult(Struct, frozen=True):
    """The result of a request: images, ordered by index, or what `final` describes."""

    images: tuple[RawImage, ...]
    timings: AnyTimings
    num_steps_run: int
    mean_batch: float  # mean number of images in its steps' batches, its own included
    predicted_s: float  # time to finish that the engine predicted when it accepted the request
    final: FinalResult | None = None
    data: memoryview | None = None  # what `final` describes


class ProgressUpdate(Struct, frozen=True):
    """The progress of a request: that of its slowest image."""

    queue_position: int | None  # images that join the batch before its last one; None: all of its images have joined
    step: int
    num_steps: int
    finish_in_s: float | None  # predicted; None while the request waits for an engine


class PreviewImage(Struct, frozen=True):
    """A small preview of image `index` after `step` steps. `rgb` is height × width × 3 bytes."""

    index: int
    step: int
    width_px: int
    height_px: int
    rgb: bytes


Update = ProgressUpdate | PreviewImage
OnUpdate = Callable[[Update], None]
"""Called in the event loop with each update of a request; must not block."""
