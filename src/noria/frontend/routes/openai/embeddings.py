"""OpenAI's embeddings API: `POST /v1/embeddings`. The unmodified openai-python client works."""

import binascii
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.routes.encoding_response import encoding_response
from noria.frontend.routes.openai.images import IgnoredText
from noria.frontend.services.priority_headers import apply_headers
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.protocol.request import Priority


class EmbeddingsRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/embeddings`: OpenAI's fields, then Noria's."""

    input: str | list[str | int | list[int]]  # a text, texts, the token ids of a text, or those of texts
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: IgnoredText | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None


class Embedding(Struct, frozen=True):
    """One embedding of an `EmbeddingsResponse`: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct, frozen=True):
    """How many tokens the texts had, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Struct, frozen=True):
    """OpenAI's response."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class EmbeddingRoutes:
    """The route `POST /v1/embeddings`."""

    def __init__(self, encoding_service: EncodingService, body_reader: JsonBodyReader) -> None:
        self._encoding_service, self._body_reader = encoding_service, body_reader

    async def embeddings(self, http: Request) -> Response:
        """Return an embedding for each text."""
        body = apply_headers(await self._body_reader.read_json(http, EmbeddingsRequestBody), http.headers)
        settings = as_settings(body)
        state = http.state
        work = self._encoding_service.encode(settings, ("embedding",), state.api_client, state.request_id)
        result = await cancel_on_disconnect(http, work)
        encoding_format = body.encoding_format or "float"
        return await encoding_response(self._encoding_service, result, lambda: response_body(result, encoding_format))


def as_settings(body: EmbeddingsRequestBody) -> TextRequestSettings:
    """Return what the body asks for. Raises InvalidField if `input` mixes texts and token ids."""
    inputs, token_ids = split_input(body.input)
    return TextRequestSettings(
        inputs=inputs,
        token_ids=token_ids,
        model=body.model,
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate=body.truncate,
        prompt_name=body.prompt_name,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
    )


def split_input(
    got: str | list[str | int | list[int]], field: str = "input"
) -> tuple[Sequence[str], Sequence[Sequence[int]]]:
    """Return the texts, and the texts that are token ids; one of both is empty. Raises InvalidField, naming `field`."""
    if isinstance(got, str):
        return [got], ()
    texts = [each for each in got if isinstance(each, str)]
    if len(texts) == len(got):
        return texts, ()
    ids = [each for each in got if isinstance(each, int)]
    if len(ids) == len(got):
        return (), [ids]
    rows = [each for each in got if isinstance(each, list)]
    if len(rows) == len(got):
        return (), rows
    raise InvalidField(
        f"{field} mixes texts and token ids; allowed are a text, a list of texts, a list of token ids, or a list of "
        "those.",
        field=field,
    )


def response_body(result: EncodingResult, encoding_format: Literal["float", "base64"]) -> bytes:
    """Return an `EmbeddingsResponse` as JSON."""
    embeddings = [
        # Each alone, so that in a thread it holds the interpreter lock for some microseconds at a time.
        msgspec.Raw(msgspec.json.encode(Embedding(index, _encode(row, encoding_format))))
        for index, row in enumerate(result.rows)
    ]
    usage = EmbeddingsUsage(result.num_tokens, result.num_tokens)
    return msgspec.json.encode(EmbeddingsResponse(embeddings, result.spec.name, usage))  # type: ignore[arg-type]


def _encode(row: "memoryview[float]", encoding_format: Literal["float", "base64"]) -> list[float] | str:
    if encoding_format == "base64":
        return binascii.b2a_base64(row, newline=False).decode()
    numbers: list[Any] = row.tolist()
    return numbers
