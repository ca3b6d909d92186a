"""All that determines a job's images, as its record holds it."""

from typing import Any

import msgspec
from msgspec import Struct

from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.request import ImageFormat, ImageRequest

# Until 0.1 a stored request had its settings beside its other fields, some under other names.
_OLD_NAMES = {
    "width_px": "width",
    "height_px": "height",
    "num_steps": "inference_steps",
    "num_images": "n",
    "num_previews": "partial_images",
}


class StoredRequest(Struct, frozen=True):
    """A request with its defaults and its seed, and the form of its files."""

    request: ImageRequest
    file_format: ImageFormat
    quality: int | None
    metadata: bool


def serialize(stored: StoredRequest) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(stored)


def deserialize(raw: str | bytes) -> StoredRequest:
    """Decode what this or an older version stored; raises msgspec.MsgspecError if it is neither."""
    stored = msgspec.json.decode(raw, type=dict[str, Any])
    request = stored.get("request")
    if isinstance(request, dict) and "payload" not in request:
        settings = {_OLD_NAMES.get(name, name): value for name, value in request.items()}
        payload = {name: settings[name] for name in DiffusionPayload.__struct_fields__ if name in settings}
        stored["request"] = request | {"payload": {"type": "diffusion", **payload}}
    return msgspec.convert(stored, StoredRequest)
