"""What a caller may ask for, and what of it travels to an engine.

`ImageBody` is the JSON of `POST /t2i`, as written: every field optional but the prompt, any default still open. `ImageRequest` is
the same wish with every default filled in and every bound checked (`frontend/services/admission.py` does that); nothing else reaches an
engine. Neither knows HTTP, models' files or schedulers' mathematics.
"""

from typing import Literal

from msgspec import Struct

ImageFormat = Literal["png", "webp", "jpeg"]

Priority = Literal["low", "normal", "high"]


class ImageRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /t2i`. `None` is "the model's default"; a seed of `None` is drawn by the server and told in the answer."""

    prompt: str
    negative_prompt: str = ""
    model: str | None = None
    seed: int | None = None
    width: int | None = None
    height: int | None = None
    inference_steps: int | None = None
    guidance_scale: float | None = None
    n: int = 1
    scheduler: str | None = None
    format: ImageFormat = "png"
    priority: Priority | None = None
    deadline_ms: int | None = None
    stream: bool = False
    partial_images: int = 0
    metadata: bool = True


class ImageRequest(Struct, frozen=True):
    """One admitted request: `num_images` images of one prompt; image k is drawn from seed + k."""

    request_id: str
    prompt: str
    negative_prompt: str
    seed: int
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    num_images: int
    scheduler: str  # a short name of schedulers.py
    timeout_s: float  # from its arrival at the engine
    model: str = ""  # the name of the model that draws it; admission fills it in
    priority: Priority = "normal"
    deadline_s: float | None = None  # from its arrival at the engine; what is late then is of no use to the caller
    num_previews: int = 0  # pictures of each image on its way
    stream_progress: bool = False  # somebody wants to hear of every step
    exclusive: bool = False  # shares the wheel with nobody: an engine has died of it, or beside it
    traceparent: str = ""  # W3C trace context of the span that asked; empty: it is in no trace
    tracestate: str = ""  # of the same: what tracing systems on its way have noted for themselves

    @property
    def guided(self) -> bool:
        """Whether each step needs an unconditional row too; as in diffusers, guidance ≤ 1 is none (Ho and Salimans, 2022)."""
        return self.guidance_scale > 1.0


def attempt_id(request_id: str, token: str) -> str:
    """The name under which one flight of a request is known to an engine; `token` has no dot."""
    return f"{request_id}.{token}"


def request_id_of(attempt: str) -> str:
    """The request's id in `flight_id`: what callers, logs and traces know it by."""
    return attempt.rpartition(".")[0] or attempt
