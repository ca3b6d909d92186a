"""The HTTP API as an OpenAPI 3.1 document: schemas from the msgspec structs, bounds and defaults from the model served.

Schemas come from the structs, bounds from `request_validation.limits`, which enforces them, error codes from
`noria.errors`. Only the descriptions are written here, and what the structs' types do not say.
tests/frontend/openapi/test_schemathesis.py sends what the document allows and what it forbids.
"""

from typing import Any

import msgspec

from noria import __version__
from noria.config import FrontendConfig
from noria.errors import (
    BodyTooLarge,
    EngineUnavailable,
    InvalidBody,
    InvalidField,
    MissingScope,
    ModelNotFound,
    RateLimited,
    RouteNotFound,
    Unauthorized,
    UnreadableImage,
)
from noria.frontend.http.errors import ErrorBody
from noria.frontend.http.paths import is_open, needed_scope
from noria.frontend.openapi.a1111 import a1111_paths
from noria.frontend.openapi.jobs import job_paths
from noria.frontend.openapi.operations import (
    EVENT_STREAM_CONTENT,
    IMAGE_CONTENT,
    error_responses,
    get_only,
    json_content,
    operation,
    parameter,
)
from noria.frontend.openapi.tei import TEI_STRUCTS, describe_tei_schemas, tei_paths, tei_root
from noria.frontend.routes.a1111.bodies import DESCRIPTIONS as A1111_DESCRIPTIONS
from noria.frontend.routes.a1111.bodies import FILE_FORMATS, Txt2Img
from noria.frontend.routes.a1111.routes import Options, ProgressResponse, Txt2ImgResponse
from noria.frontend.routes.image_metadata import MAX_BYTES, RecoveredSettings
from noria.frontend.routes.image_metadata import PATH as IMAGE_METADATA_PATH
from noria.frontend.routes.images import ImagesResponse
from noria.frontend.routes.jobs import ENDPOINTS, JobList, JobRequestBody
from noria.frontend.routes.openai_embeddings import EmbeddingsRequestBody, EmbeddingsResponse
from noria.frontend.routes.openai_images import (
    IGNORED_FIELDS,
    EncoderDetail,
    GenerationsRequestBody,
    GenerationsResponse,
    ModelCard,
    ModelDetail,
    ModelList,
)
from noria.frontend.services.request_validation import Limits, limits
from noria.images import scheduler_names
from noria.images.a1111_names import samplers_and_types
from noria.jobs.records import Job
from noria.jobs.webhooks.url_check import MAX_URL_CHARS
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequestBody

DESCRIPTIONS = {
    "prompt": "what the image shows",
    "negative_prompt": "what it should not show; has an effect only with a guidance_scale above 1",
    "seed": "the same seed and settings give the same image; image k of n uses seed + k; default: random",
    "width": "in pixels",
    "height": "in pixels",
    "inference_steps": "denoising steps",
    "guidance_scale": "strength of classifier-free guidance; 1 or less switches it off and halves the work",
    "n": "number of images; more than one are returned as JSON",
    "scheduler": "the sampler: its short name, an alias or its class name in diffusers",
    "format": "the image file's format; webp has quality 90, jpeg 95",
    "model": "the name of a served model, or `noria` for the first one",
    "size": "`WIDTHxHEIGHT` in pixels, or `auto` for the model's default",
    "output_format": "the image file's format",
    "output_compression": "quality of webp and jpeg, 0 to 100; no effect on png",
    "response_format": "`b64_json`; `url` is rejected, because only images of jobs are stored",
    "stream": "return server-sent events: progress, previews, the finished images",
    "partial_images": "number of previews of each image in a stream; needs `stream`",
    "priority": "`low`, `normal` or `high`: the order in which queued images join the running batch",
    "deadline_ms": "milliseconds from now in which the images are needed; rejected at once if that is not possible",
    "metadata": "whether the files contain their settings",
} | dict.fromkeys(IGNORED_FIELDS, "accepted for OpenAI's clients and ignored")

# Fields of A1111's bodies.
_DESCRIPTIONS_A1111 = A1111_DESCRIPTIONS | {
    "sd_model_checkpoint": "the model of later requests of this API: a title of `sd-models`, a name or a fingerprint",
    "samples_format": "the file format of later requests of this API: `png`, `webp` or `jpg`",
}

_MAX_DIMENSIONS = 65_536  # of any text encoder

_DESCRIPTIONS_EMBEDDINGS = {
    "input": "a text, a list of texts, the token ids of a text, or a list of those, at most `frontend.max_texts` texts; none may be empty",
    "model": "the name of a served text encoder, or `noria` for the first one",
    "dimensions": "cut the embeddings to so many numbers",
    "encoding_format": "`float`: numbers; `base64`: little-endian float32",
    "user": DESCRIPTIONS["user"],
    "normalize": "whether embeddings have length 1; default: as the model's own configuration says",
    "truncate": "cut texts that are too long, or reject them; default: `frontend.truncate_texts`",
    "prompt_name": "name of the model's prompt to put before each text; default: the model's default prompt",
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded",
    "deadline_ms": "milliseconds from now in which the embeddings are needed; rejected at once if that is not possible",
}

_DESCRIPTIONS_JOBS = {
    "input": 'a body of `POST /t2i`, or, with `"endpoint": "/v1/images/generations"` in it, of that route; '
    "without a seed, a random one is added",
    "webhook": "URL to POST the job to when it starts and when it has ended, signed as in Standard Webhooks",
    "webhook_events_filter": "which of the events `start` and `completed` to send; default: both",
}

_STRUCTS = (
    ImageRequestBody,
    ImagesResponse,
    GenerationsRequestBody,
    GenerationsResponse,
    ModelList,
    ModelCard,
    ModelDetail,
    EncoderDetail,
    EmbeddingsRequestBody,
    EmbeddingsResponse,
    RecoveredSettings,
    Txt2Img,
    Txt2ImgResponse,
    Options,
    ProgressResponse,
    JobRequestBody,
    Job,
    JobList,
    ErrorBody,
    *TEI_STRUCTS,
)

_EXAMPLES: dict[str, dict[str, Any]] = {
    "ImageRequestBody": {"prompt": "a red circle above a blue square", "seed": 7},
    "GenerationsRequestBody": {"prompt": "a red circle above a blue square", "n": 2, "output_format": "webp"},
    "Txt2Img": {"prompt": "a red circle above a blue square", "sampler_name": "Euler", "steps": 20, "seed": -1},
    "Options": {"samples_format": "png"},
    "EmbeddingsRequestBody": {"input": ["a red circle", "a blue square"]},
    "JobRequestBody": {"input": {"prompt": "a red circle above a blue square", "seed": 7}},
}


def openapi(spec: DiffusionModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
    """Return the document; without a `spec` (no engine has been ready) it lacks the model's bounds and defaults."""
    paths = _paths()
    components: dict[str, Any] = {"schemas": _schemas(spec, config)}
    if config.api_keys_file:
        components["securitySchemes"] = _SECURITY_SCHEMES
        _require_keys(paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Noria",
            "version": __version__,
            "description": "Images from text, and embeddings of texts. "
            + (f"Serving {spec.name}." if spec else "No image model is ready."),
        },
        "paths": paths,
        "components": components,
    }


_SECURITY_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "`Authorization: Bearer KEY`, as OpenAI's clients send it",
    },
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "any user, and KEY as the password, as A1111's clients send it",
    },
}


def _require_keys(paths: dict[str, Any]) -> None:
    """Add to `paths` which operations need an API key, with which scope, and the errors without."""
    for path, item in paths.items():
        for method, operation_object in item.items():
            if is_open(method.upper(), path):
                continue
            scope = needed_scope(path)
            operation_object["security"] = [{name: [scope] if scope else []} for name in _SECURITY_SCHEMES]
            for status, response in error_responses([Unauthorized, *([MissingScope] if scope else [])]).items():
                operation_object["responses"].setdefault(status, response)


def _schemas(spec: DiffusionModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    for body, descriptions in (
        (ImageRequestBody, DESCRIPTIONS),
        (GenerationsRequestBody, DESCRIPTIONS),
        (Txt2Img, _DESCRIPTIONS_A1111),
        (Options, _DESCRIPTIONS_A1111),
        (JobRequestBody, _DESCRIPTIONS_JOBS),
        (EmbeddingsRequestBody, _DESCRIPTIONS_EMBEDDINGS),
    ):
        schema = schemas[body.__name__]
        schema["example"] = _EXAMPLES[body.__name__]
        properties: dict[str, Any] = schema["properties"]
        for name in {"prompt", "negative_prompt"} & properties.keys():
            properties[name]["maxLength"] = config.max_prompt_chars
        if spec is not None:
            for name, allowed in limits(spec, config).items():
                if name in properties:
                    _add_bounds(properties[name], allowed)
        for name, field in properties.items():
            field["description"] = descriptions[name]
    for body in (ImageRequestBody, GenerationsRequestBody):
        if spec is not None:
            schemas[body.__name__]["properties"]["scheduler"] |= {
                "anyOf": [{"enum": list(spec.schedulers)}, {"enum": _other_spellings(spec)}, {"type": "null"}],
                "default": spec.default_scheduler,
                "examples": list(spec.schedulers),
            }
        schemas[body.__name__]["anyOf"] = [  # `partial_images` needs `stream`
            {"properties": {"partial_images": {"enum": [0, None]}}},
            {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        ]
    _describe_size(schemas["GenerationsRequestBody"]["properties"], spec)
    describe_tei_schemas(schemas, config)
    _describe_embeddings(schemas["EmbeddingsRequestBody"]["properties"])
    schemas["Options"]["properties"]["samples_format"] = {"enum": [*FILE_FORMATS, "", None]} | {
        "description": _DESCRIPTIONS_A1111["samples_format"]
    }
    schemas["Txt2Img"] |= _a1111_bounds(schemas["Txt2Img"]["properties"], spec, config)
    schemas["JobRequestBody"]["properties"]["webhook"] |= {"format": "uri", "maxLength": MAX_URL_CHARS}
    schemas["JobRequestBody"]["properties"]["input"]["anyOf"] = [
        _job_input(schemas["ImageRequestBody"], ENDPOINTS[0], required=[]),
        _job_input(schemas["GenerationsRequestBody"], ENDPOINTS[1], required=["endpoint"]),
    ]
    return schemas


def _add_bounds(field: dict[str, Any], allowed: Limits) -> None:
    """Add the model's bounds and default to a number."""
    types = [each["type"] for each in field.pop("anyOf", [field])]
    field |= {"type": types if len(types) > 1 else types[0], "minimum": allowed.min, "maximum": allowed.max}
    if allowed.multiple > 1:
        field["multipleOf"] = allowed.multiple
    if allowed.default is not None:
        field["default"] = allowed.default


def _other_spellings(spec: DiffusionModelSpec) -> list[str]:
    """Return what else than the short names names one of the model's schedulers."""
    return [
        spelling
        for choice in map(scheduler_names.find, spec.schedulers)
        for spelling in (*choice.aliases, choice.diffusers_class)
        if scheduler_names.find(spelling) is choice
    ]


def _describe_size(properties: dict[str, Any], spec: DiffusionModelSpec | None) -> None:
    """Describe the sizes of OpenAI's body, which are a text, and its `response_format`."""
    sides = "[0-9]{1,6}"
    if spec is not None:
        sides = f"({'|'.join(map(str, range(spec.min_side_px, spec.max_side_px + 1, spec.multiple_px)))})"
    properties["size"] |= {"anyOf": [{"type": "string", "pattern": f"^(auto|{sides}x{sides})$"}, {"type": "null"}]}
    properties["response_format"]["anyOf"] = [{"enum": ["b64_json"]}, {"type": "null"}]


def _describe_embeddings(properties: dict[str, Any]) -> None:
    """Describe the four forms of `input`, and the bounds that do not depend on the model."""
    text, token_ids = {"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": {"type": "integer"}}
    several = {"type": "array", "minItems": 1}
    properties["input"]["anyOf"] = [text, several | {"items": text}, token_ids, several | {"items": token_ids}]
    _add_bounds(properties["dimensions"], Limits(1, _MAX_DIMENSIONS, None))


def _a1111_bounds(
    properties: dict[str, Any], spec: DiffusionModelSpec | None, config: FrontendConfig
) -> dict[str, Any]:
    """Add bounds and names to the fields of A1111's body; returns its condition for the number of images."""
    for name in ("send_images", "metadata"):
        properties[name]["anyOf"].insert(1, {"enum": [0, 1, "0", "1", "true", "false"]})
    if spec is None:
        return {}
    allowed = limits(spec, config)
    for name, noria_name in (("steps", "inference_steps"), ("cfg_scale", "guidance_scale"), ("seed", "seed")):
        _add_bounds(properties[name], allowed[noria_name])
    properties["seed"]["minimum"] = -1
    samplers, types = samplers_and_types(spec.schedulers)
    for name, values in (("sampler_name", samplers), ("sampler_index", samplers), ("scheduler", types)):
        properties[name]["anyOf"] = [{"enum": [*values, ""]}, {"type": "null"}]
    max_images = config.max_images
    for name in ("batch_size", "n_iter"):
        _add_bounds(properties[name], Limits(1, max_images, None))
    # The product is bounded: the largest n_iter for each batch_size.
    pairs = {
        max_images // num_batches: max_images // (max_images // num_batches) for num_batches in range(1, max_images + 1)
    }
    return {
        "anyOf": [
            {"properties": {"batch_size": {"maximum": batch_size}, "n_iter": {"maximum": num_batches}}}
            for batch_size, num_batches in pairs.items()
        ]
    }


def _job_input(schema: dict[str, Any], endpoint: str, required: list[str]) -> dict[str, Any]:
    """Return the schema of a job's input, which is the body of `endpoint` without streaming."""
    properties = {
        name: field for name, field in schema["properties"].items() if name not in ("stream", "partial_images")
    }
    return {
        "type": "object",
        "properties": properties | {"endpoint": {"const": endpoint}},
        "required": [*schema["required"], *required],
        "additionalProperties": False,
    }


def _paths() -> dict[str, Any]:
    return {
        "/t2i": {
            "post": operation(
                "Generate images",
                "One image is returned as a file, with its seed in X-Noria-Seed and its timings in Server-Timing; "
                "several, or one for a client that accepts JSON but no image, as JSON.",
                body=ImageRequestBody,
                content=IMAGE_CONTENT | json_content(ImagesResponse) | EVENT_STREAM_CONTENT,
            )
        },
        "/v1/images/generations": {
            "post": operation(
                "Generate images with OpenAI's API",
                "The unmodified OpenAI clients work; send Noria's own fields in `extra_body`.",
                body=GenerationsRequestBody,
                content=json_content(GenerationsResponse) | EVENT_STREAM_CONTENT,
            )
        },
        "/v1/embeddings": {
            "post": operation(
                "Embed texts with OpenAI's API",
                "The unmodified OpenAI clients work; send Noria's own fields in `extra_body`. X-Noria-Truncated has the "
                "number of texts that were too long and were cut.",
                body=EmbeddingsRequestBody,
                content=json_content(EmbeddingsResponse),
            )
        },
        IMAGE_METADATA_PATH: {"post": _image_metadata_operation()},
        "/v1/models": {
            "get": operation(
                "List the models served",
                "In the form of OpenAI's API; `noria` has each model's bounds, defaults and schedulers.",
                content=json_content(ModelList),
                errors=[EngineUnavailable],
            )
        },
        "/v1/models/{model}": {
            "get": operation(
                "Get one model",
                "In the form of OpenAI's API, with the model's defaults, load and measured costs.",
                content={
                    "application/json": {
                        "schema": {
                            "oneOf": [
                                {"$ref": f"#/components/schemas/{name}"} for name in ("ModelDetail", "EncoderDetail")
                            ]
                        }
                    }
                },
                errors=[ModelNotFound, EngineUnavailable],
            )
            | {"parameters": [parameter("model", "path")]}
        },
        **job_paths(),
        "/v1/live": {
            "get": operation(
                "Stream the running batches",
                "Server-sent events without an end: `engines`, the state of each engine, at every change; `engine_view`, "
                "up to five times a second for each engine: its slots, queue, last iterations and, unless `thumbnails` is "
                "false, thumbnails of its images.",
                content=EVENT_STREAM_CONTENT,
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [parameter("thumbnails", "query", type="boolean", default=True)]}
        },
        **tei_paths(),
        **a1111_paths(),
        "/healthz": get_only("Check liveness", "200 as long as the process responds.", "application/json"),
        "/readyz": {"get": _readiness_operation()},
        "/metrics": get_only("Get the metrics", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": get_only("Get this document", "OpenAPI 3.1.", "application/json"),
        "/docs": get_only(
            "Read the documentation of this API", "One page that loads nothing from other servers.", "text/html"
        ),
        "/live": get_only(
            "Open the live view", "A page with the running batch, its queue and its statistics.", "text/html"
        ),
        "/text": get_only(
            "Open the playground of texts", "A page that embeds, classifies and ranks texts.", "text/html"
        ),
        "/": get_only(
            "Open the playground", "A page that generates images; without an image model, as `/text`.", "text/html"
        )
        | {"post": tei_root()},
    }


def _readiness_operation() -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    described = operation(
        "Check readiness",
        "200 if an engine is ready, else 503; the body has the state of each engine.",
        content=content,
    )
    described["responses"]["503"] = {"description": "no engine is ready", "content": content}
    return described


def _image_metadata_operation() -> dict[str, Any]:
    described = operation(
        "Read an image file's settings",
        f"The body is the file, at most {MAX_BYTES // 2**20} MiB of PNG, WebP or JPEG with the metadata of Noria or "
        "A1111. `settings` is a body of `POST /t2i`; `rejected` has the settings that this server does not support, "
        "with reasons. Other bytes are rejected.",
        content=json_content(RecoveredSettings),
        errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, EngineUnavailable],
    )
    return described | {"requestBody": {"required": True, "content": IMAGE_CONTENT}}
