"""The protocols of image servers: how a body of `/t2i` is sent, and a reply read. Imports little: clients import it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from noria_bench.targets.catalog import Protocol

_PNG = b"\x89PNG"


def encode_request(protocol: Protocol, body: Mapping[str, Any]) -> bytes:
    """The content of a request."""
    content = msgspec.json.encode(body)
    if protocol == "t2i":
        return content
    return msgspec.json.encode(
        {
            "parameters": {"body": content.decode()},
            "inputs": [{"name": "ONE", "datatype": "INT32", "shape": [1, 1], "data": [1]}],
            "outputs": [{"name": "IMAGE", "parameters": {"binary_data": True}}, {"name": "BATCH"}],
        }
    )


def decode_reply(protocol: Protocol, headers: Mapping[str, str], content: bytes) -> tuple[Mapping[str, str], bytes]:
    """The headers (names in lower case) and the content that `/t2i` would have; an unreadable reply has no image."""
    if protocol == "t2i":
        return headers, content
    try:
        length = int(headers["inference-header-content-length"])
        outputs = {output["name"]: output for output in msgspec.json.decode(content[:length])["outputs"]}
        image, (batch_size,) = content[length:], outputs["BATCH"]["data"]
    except (LookupError, TypeError, ValueError):
        return {"content-type": "application/octet-stream"}, content
    kind = "image/png" if image.startswith(_PNG) else "application/json"
    return {"content-type": kind, "x-batch-size": str(batch_size)}, image
