"""Requests, as clients send them and as engines get them.

`ImageRequestBody` is the JSON of `POST /t2i`: only the prompt is required, and defaults are not filled in.
`EngineRequest` is what an engine gets: what all kinds of model have in common, and a payload of one kind. Its defaults
are filled in and its bounds are checked (by `frontend/services/images/request_validation.py`). Neither depends on HTTP,
on model files or on schedulers.
"""

from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from noria.protocol.diffusion import DiffusionPayload, ImageSettings, Lora, PromptSyntax, Refinement, SecondPass
from noria.protocol.kinds import Payload
from noria.protocol.text import TextPayload

ImageFormat = Literal["png", "webp", "jpeg"]

Priority = Literal["low", "normal", "high"]

PayloadT_co = TypeVar("PayloadT_co", bound=Payload, covariant=True)


class ControlField(Struct, frozen=True, forbid_unknown_fields=True):
    """A ControlNet that steers the image by an image: a file in base64, or as a data: URL."""

    name: str
    image: str | None = None  # only in a form, whose files are apart
    scale: float = 1.0
    start: float = 0.0  # a part of the steps, from 0 to 1: it steers those that are wholly between start and end
    end: float = 1.0


class IpAdapterField(Struct, frozen=True, forbid_unknown_fields=True):
    """An IP-Adapter with the image that it conditions on: a file in base64, or as a data: URL."""

    name: str
    image: str | None = None  # only in a form, whose files are apart
    scale: float = 1.0


class ImageRequestBody(ImageSettings, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /t2i`.

    `None` means the model's default; for a seed of `None` the server chooses one and reports it.
    """

    n: int = 1
    model: str | None = None
    format: ImageFormat = "png"
    priority: Priority | None = None
    deadline_ms: int | None = None
    stream: bool = False
    partial_images: int = 0
    metadata: bool = True
    loras: tuple[Lora, ...] = ()  # their changes are added
    image: str | None = None  # the start image: a file in base64, or as a data: URL
    mask: str | None = None  # likewise; white is repainted
    strength: float | None = None
    controls: tuple[ControlField, ...] = ()  # their residuals are added
    reference_images: tuple[str, ...] = ()  # which the model is shown: files in base64, or as data: URLs
    ip_adapter: IpAdapterField | None = None  # conditions the images on an image, beside the prompt
    refiner: Refinement | None = None  # makes the last steps
    calls: float | None = None  # the share of the model's calls that are made, from MIN_CALLS to 1
    prompt_syntax: PromptSyntax | None = None  # in which both prompts are read
    clip_skip: int | None = None  # the layer of a CLIP text encoder that is read, from the end; 1: the last one

    @property
    def images(self) -> list[str]:
        """All images in base64."""
        found = [self.image, self.mask, *(control.image for control in self.controls), *self.reference_images]
        found += [] if self.ip_adapter is None else [self.ip_adapter.image]
        return [image for image in found if image is not None]

    @property
    def has_images(self) -> bool:
        """Whether there are images, or fields of them."""
        fields = self.controls, self.reference_images, self.ip_adapter
        return any(fields) or self.image is not None or self.mask is not None

    def without_images(self) -> "ImageRequestBody":
        """Return the body without its images, which are long."""
        controls = tuple(msgspec.structs.replace(control, image=None) for control in self.controls)
        ip_adapter = self.ip_adapter and msgspec.structs.replace(self.ip_adapter, image=None)
        return msgspec.structs.replace(
            self, image=None, mask=None, controls=controls, reference_images=(), ip_adapter=ip_adapter
        )


class TwoPassRequestBody(ImageRequestBody, frozen=True):
    """The settings of images that may have a second pass, of protocols that know it."""

    second_pass: SecondPass | None = None


class EngineRequest(Struct, Generic[PayloadT_co], frozen=True, tag="Submit"):
    """An admitted request, and the message that submits it to an engine.

    Each attempt at an engine has an `attempt_id` of its own, since two clients may send the same `request_id`, and a
    retry may meet its first attempt.
    """

    request_id: str  # the one that clients, logs and traces use
    model: str
    payload: PayloadT_co
    timeout_s: float  # from its arrival at the engine
    attempt_id: str = ""  # what engines call it; empty until it is submitted to one
    model_version: str = ""  # ModelSpec.fingerprint; empty: the first that the engine holds
    client: str = ""  # the name of the API key, for the log; empty: none
    share_client: str = ""  # whose share of the device it takes; those without a name share one
    share_weight: float = 1.0  # weight of that client's share, above 0
    priority: Priority = "normal"
    deadline_s: float | None = None  # from its arrival at the engine; a result after that is useless to the client
    stream_progress: bool = False  # whether to send `Progress` repeatedly
    exclusive: bool = False  # never batched with other requests, because an engine crashed while this one was in flight
    was_moved: bool = False  # another engine had accepted it: full queues and full memory for images do not reject it
    traceparent: str = ""  # W3C trace context of the submitting span; empty: not part of a trace
    tracestate: str = ""  # W3C trace context, vendor-specific part


AnyRequest = EngineRequest[Any]
ImageRequest = EngineRequest[DiffusionPayload]
TextRequest = EngineRequest[TextPayload]
