"""All that determines the results of a job beside its texts, as its record holds it."""

import base64
import zlib
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria.protocol.request import ImageFormat, ImageRequest
from noria.protocol.text import Activation, EncoderTask


class StoredRequest(Struct, frozen=True):
    """A request with its defaults and its seed, and the form of its files."""

    request: ImageRequest
    file_format: ImageFormat
    quality: int | None
    metadata: bool


class TextJobRequest(Struct, frozen=True, kw_only=True):
    """The request to a text encoder, and what the results are."""

    task: EncoderTask
    num_texts: int  # a pair counts as one
    num_chunks: int
    num_columns: int  # numbers of a text's result, or of a token's; of a sparse one with its zeros
    labels: tuple[str, ...] = ()  # labels of the columns; empty: an embedding
    activation: Activation = "identity"  # what makes scores of logits
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    role: Literal["query", "document"] | None = None  # the side of a search that the texts are on
    traceparent: str = ""  # as of `EngineRequest`
    tracestate: str = ""

    @property
    def is_ragged(self) -> bool:
        """Whether texts have different numbers of rows."""
        return self.task in ("sparse_embedding", "token_embedding")

    @property
    def row_width(self) -> int:
        """Numbers of a row: of a sparse embedding a token's id and its number."""
        return 2 if self.task == "sparse_embedding" else self.num_columns


class StoredTextRequest(Struct, frozen=True):
    """The request of a job of texts."""

    request: TextJobRequest
    kind: Literal["texts"] = "texts"


def pack_start_image(data: bytes) -> bytes:
    """Return the pixels of a start image as the database has them: compressed, as text."""
    return base64.b64encode(zlib.compress(data, 1))


def unpack_start_image(packed: str) -> bytes:
    """Return the pixels that `pack_start_image` has packed."""
    return zlib.decompress(base64.b64decode(packed))


def serialize(stored: StoredRequest | StoredTextRequest) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(stored)


def deserialize(raw: str | bytes) -> StoredRequest | StoredTextRequest:
    """Decode what `serialize` encoded; raises msgspec.MsgspecError if it is something else."""
    stored = msgspec.json.decode(raw, type=dict[str, Any])
    if stored.get("kind") == "texts":
        return msgspec.convert(stored, StoredTextRequest)
    return msgspec.convert(stored, StoredRequest)
