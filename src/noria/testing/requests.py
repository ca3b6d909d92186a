"""Requests for an engine, for tests of engines and schedulers."""

import math
from typing import Any

from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.request import EngineRequest, ImageRequest

_SETTINGS = DiffusionPayload(
    prompt="a circle",
    negative_prompt="",
    seed=7,
    width=8,
    height=8,
    inference_steps=3,
    guidance_scale=2.0,
    scheduler="ddim",
)


def make_image_request(request_id: str = "a", model: str = "", **changes: Any) -> ImageRequest:
    """A small request without a time limit; `changes` are fields of `DiffusionPayload` or of `EngineRequest`."""
    settings = {name: getattr(_SETTINGS, name) for name in DiffusionPayload.__struct_fields__}
    payload = DiffusionPayload(**{name: changes.pop(name, value) for name, value in settings.items()})
    envelope: dict[str, Any] = {"attempt_id": request_id, "timeout_s": math.inf} | changes
    return EngineRequest(request_id, model, payload, **envelope)
