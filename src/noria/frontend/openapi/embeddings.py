"""The body of OpenAI's route for embeddings in the OpenAPI document, and its path."""

from typing import Any

from noria.config import FrontendConfig
from noria.frontend.openapi import images
from noria.frontend.openapi.operations import add_bounds, json_content, operation
from noria.frontend.routes.openai.embeddings import EmbeddingsRequestBody, EmbeddingsResponse
from noria.frontend.services.images.request_validation import Limits
from noria.protocol.text import EncoderModelSpec

MAX_DIMENSIONS = 65_536  # of any text encoder

DESCRIPTIONS = {
    "input": "a text, a list of texts, the token ids of a text, or a list of those, at most `frontend.max_texts` "
    "texts; none may be empty",
    "model": "the name of a served text encoder, or `noria` for the first one",
    "dimensions": "cut the embeddings to so many numbers",
    "encoding_format": "`float`: numbers; `base64`: little-endian float32",
    "user": images.DESCRIPTIONS["user"],
    "normalize": "whether embeddings have length 1; default: as the model's own configuration says",
    "truncate": "cut texts that are too long, or reject them; default: `frontend.truncate_texts`",
    "prompt_name": "name of the model's prompt to put before each text; default: the model's default prompt",
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded",
    "deadline_ms": "milliseconds from now in which the embeddings are needed; rejected at once if that is not possible",
}


def add_to_schemas(schemas: dict[str, Any], config: FrontendConfig, spec: EncoderModelSpec | None) -> None:
    """Describe the four forms of `input`, and the bounds; without a `spec` those that do not depend on the model."""
    properties = schemas["EmbeddingsRequestBody"]["properties"]
    token_id: dict[str, Any] = {"type": "integer", "minimum": 0}
    if spec is not None:
        token_id["maximum"] = spec.vocab_size - 1
        properties["prompt_name"]["enum"] = [*(name for name, _ in spec.prompts), None]
    text = {"type": "string", "minLength": 1, "maxLength": config.max_text_chars}
    token_ids = {"type": "array", "minItems": 1, "items": token_id}
    several = {"type": "array", "minItems": 1, "maxItems": config.max_texts}
    properties["input"]["anyOf"] = [text, several | {"items": text}, token_ids, several | {"items": token_ids}]
    add_bounds(properties["dimensions"], Limits(1, MAX_DIMENSIONS if spec is None else spec.dimensions, None))
    add_bounds(properties["deadline_ms"], Limits(1, int(config.request_timeout_s * 1000), None))


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    return {
        "/v1/embeddings": {
            "post": operation(
                "Embed texts with OpenAI's API",
                "The unmodified OpenAI clients work; send Noria's own fields in `extra_body`. X-Noria-Truncated has "
                "the number of texts that were too long and were cut.",
                body=EmbeddingsRequestBody,
                content=json_content(EmbeddingsResponse),
            )
        },
    }
