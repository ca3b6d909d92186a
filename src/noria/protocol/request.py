"""Image requests, as clients send them and as engines get them.

`ImageRequestBody` is the JSON of `POST /t2i`: only the prompt is required, and defaults are not filled in.
`ImageRequest` has every default filled in and every bound checked (by `frontend/services/request_validation.py`), and is what an
engine gets. Neither depends on HTTP, on model files or on schedulers.
"""

from typing import Literal

from msgspec import Struct

ImageFormat = Literal["png", "webp", "jpeg"]

Priority = Literal["low", "normal", "high"]


class ImageRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /t2i`.

    `None` means the model's default; for a seed of `None` the server chooses one and reports it.
    """

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
    """An admitted request for `num_images` images of one prompt; image k has the seed `seed` + k."""

    request_id: str
    prompt: str
    negative_prompt: str
    seed: int
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    num_images: int
    scheduler: str  # a short name from images/scheduler_names.py
    timeout_s: float  # from its arrival at the engine
    model: str = ""  # filled in by admission
    priority: Priority = "normal"
    deadline_s: float | None = None  # from its arrival at the engine; a result after that is useless to the client
    num_previews: int = 0  # of each image
    stream_progress: bool = False  # whether to send `Progress` repeatedly
    exclusive: bool = False  # never batched with other requests, because an engine crashed while this one was in flight
    traceparent: str = ""  # W3C trace context of the submitting span; empty: not part of a trace
    tracestate: str = ""  # W3C trace context, vendor-specific part

    @property
    def guided(self) -> bool:
        """Whether each step needs a second, unconditional row (Ho and Salimans, 2022).

        As in diffusers, not for a scale ≤ 1.
        """
        return self.guidance_scale > 1.0


def attempt_id(request_id: str, token: str) -> str:
    """The id of one attempt of a request at an engine; `token` must not contain a dot."""
    return f"{request_id}.{token}"


def request_id_of(attempt: str) -> str:
    """The request's id in an attempt's id: the one that clients, logs and traces use."""
    return attempt.rpartition(".")[0] or attempt
