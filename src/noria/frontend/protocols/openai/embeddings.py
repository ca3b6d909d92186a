"""OpenAI's embeddings API: `POST /v1/embeddings`. The unmodified openai-python client works."""

import binascii
import contextlib
import functools
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.frontend.bodies.encoding_response import encoding_response
from noria.frontend.bodies.image_fields import add_bounds
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http.body import JsonBodyReader, apply_headers, decode, is_small
from noria.frontend.http.operations import JsonObject, Operation, Served
from noria.frontend.protocols.openai.images import IgnoredText
from noria.frontend.services.images.request_validation import Limits
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.frontend.services.texts.text_request import (
    SIDE_FIELDS,
    InputObject,
    InputType,
    InputTypeOrTask,
    TextRequestSettings,
    role_of,
    split_input,
    split_objects,
)
from noria.protocol.request import Priority


class EmbeddingsRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/embeddings`: OpenAI's fields, then Noria's."""

    # a text, texts, the token ids of a text or those of texts, or texts and images
    input: str | InputObject | list[str | int | list[int] | InputObject]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: IgnoredText | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    task: InputTypeOrTask | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None

    @property
    def images(self) -> list[str]:
        """All images in base64."""
        inputs = self.input if isinstance(self.input, list) else [self.input]
        return [each.image for each in inputs if isinstance(each, InputObject) and each.image is not None]


class Embedding(Struct, frozen=True):
    """An embedding of an `EmbeddingsResponse`: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct, frozen=True):
    """How many tokens the texts had, special tokens included; an image counts as tokens that take about as long."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Struct, frozen=True):
    """OpenAI's response."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


MAX_DIMENSIONS = 65_536
"""The most numbers of an embedding of any text encoder."""

_FIELDS = {
    "input": "a text, a list of texts, the token ids of a text, or a list of those, at most `frontend.max_texts` "
    "texts; none may be empty. Instead of a text there may be an object with `text`, or with `image`: a file in "
    "base64, for models that take images",
    "model": "the name of a served text encoder, or `noria` for the first one",
    "dimensions": "cut the embeddings to so many numbers",
    "encoding_format": "`float`: numbers; `base64`: little-endian float32",
    "user": "whose share of an engine the request takes, on a server without API keys",
    "normalize": "whether embeddings have length 1; default: as the model's own configuration says",
    "truncate": "cut texts that are too long, or reject them; default: `frontend.truncate_texts`",
    "prompt_name": "name of the model's prompt to put before each text; default: the model's default prompt",
    **SIDE_FIELDS,
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded",
    "deadline_ms": "milliseconds from now in which the embeddings are needed; rejected at once if that is not possible",
}


def _describe_embeddings(schemas: dict[str, JsonObject], served: Served) -> None:
    """Describe the four forms of `input`, and the bounds; those of the model if it is known."""
    properties, config, spec = (
        schemas[EmbeddingsRequestBody.__name__]["properties"],
        served.config,
        served.embedding_spec,
    )
    token_id: JsonObject = {"type": "integer", "minimum": 0}
    if spec is not None:
        token_id["maximum"] = spec.vocab_size - 1
        properties["prompt_name"]["enum"] = [*(name for name, _ in spec.prompts), None]
    text = {"type": "string", "minLength": 1, "maxLength": config.max_text_chars}
    token_ids = {"type": "array", "minItems": 1, "items": token_id}
    several = {"type": "array", "minItems": 1, "maxItems": config.max_texts}
    of_object = next(each for each in properties["input"]["anyOf"] if "$ref" in each)
    mixed = {"anyOf": [text, of_object]}
    lists = [several | {"items": items} for items in (text, token_ids, mixed)]
    properties["input"]["anyOf"] = [text, token_ids, of_object, *lists]
    add_bounds(properties["dimensions"], Limits(1, MAX_DIMENSIONS if spec is None else spec.dimensions, None))
    add_bounds(properties["deadline_ms"], Limits(1, int(config.request_timeout_s * 1000), None))


class EmbeddingRoutes:
    """The route `POST /v1/embeddings`."""

    def __init__(self, encoding_service: EncodingService, body_reader: JsonBodyReader) -> None:
        self._encoding_service, self._body_reader = encoding_service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="POST",
                path="/v1/embeddings",
                handler=self._embeddings,
                group="Encode texts",
                scopes=("generate",),
                summary="Embed texts with OpenAI's API",
                description="The unmodified OpenAI clients work; send Noria's own fields in `extra_body`. "
                "X-Noria-Truncated has the number of texts that were too long and were cut.",
                body=EmbeddingsRequestBody,
                fields=_FIELDS,
                example={"input": ["a red circle", "a blue square"]},
                response=EmbeddingsResponse,
                describe=_describe_embeddings,
            )
        ]

    async def _embeddings(self, http: Request) -> Response:
        context: RequestContext = http.state.context
        with contextlib.ExitStack() as slots:
            if is_small(http):
                body = await self._body_reader.read_json(http, EmbeddingsRequestBody)
            else:
                raw = await self._body_reader.receive(http, slots)
                body = decode(raw, EmbeddingsRequestBody)
                self._body_reader.check_length(raw, *body.images)
                del raw
            body = apply_headers(body, http.headers)
            context.name_user(body.user)
            encoding_format = body.encoding_format or "float"
            encoding = self._encoding_service.encode(as_settings(body), ("embedding",), context, slots.close)
            del body  # with images it is long
            result = await encoding
        make = functools.partial(response_body, result, encoding_format)
        return await encoding_response(self._encoding_service, result, make)


def as_settings(body: EmbeddingsRequestBody) -> TextRequestSettings:
    """Return what the body asks for. Raises InvalidField: `input` mixes texts and token ids, or the sides differ."""
    others, images = split_objects(body.input)
    inputs, token_ids = split_input(others)
    return TextRequestSettings(
        inputs=inputs,
        images=images,
        token_ids=token_ids,
        model=body.model,
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate=body.truncate,
        prompt_name=body.prompt_name,
        role=role_of(body.input_type, body.task),
        task=body.task,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
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
