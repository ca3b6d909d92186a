"""The HTTP API as an OpenAPI 3.1 document: schemas from the msgspec structs, bounds and defaults from the model served.

Schemas come from the structs, bounds from `request_validation.limits`, which enforces them, error codes from `noria.errors`.
Only the descriptions are written here; a test requires one for every field.
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
    ModelNotFound,
    RateLimited,
    RouteNotFound,
    Unauthorized,
    UnreadableImage,
)
from noria.frontend.http.errors import ErrorBody
from noria.frontend.http.paths import OPEN_PATHS
from noria.frontend.openapi.a1111 import a1111_paths
from noria.frontend.openapi.jobs import job_paths
from noria.frontend.openapi.operations import (
    IMAGE_CONTENT,
    error_responses,
    get_only,
    json_content,
    operation,
    parameter,
)
from noria.frontend.routes.a1111.bodies import DESCRIPTIONS as A1111_DESCRIPTIONS
from noria.frontend.routes.a1111.bodies import Txt2Img
from noria.frontend.routes.a1111.routes import Options, ProgressResponse, Txt2ImgResponse
from noria.frontend.routes.image_metadata import MAX_BYTES, RecoveredSettings
from noria.frontend.routes.image_metadata import PATH as IMAGE_METADATA_PATH
from noria.frontend.routes.images import ImagesResponse
from noria.frontend.routes.jobs import JobList, JobRequestBody
from noria.frontend.routes.openai_images import (
    IGNORED_FIELDS,
    GenerationsRequestBody,
    GenerationsResponse,
    ModelCard,
    ModelDetail,
    ModelList,
)
from noria.frontend.services.request_validation import limits
from noria.jobs.records import Job
from noria.protocol.model_spec import ModelSpec
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
    "partial_images": "number of previews of each image in a stream",
    "priority": "`low`, `normal` or `high`: the order in which queued images join the running batch",
    "deadline_ms": "milliseconds from now in which the images are needed; rejected at once if that is not possible",
    "metadata": "whether the files contain their settings",
} | dict.fromkeys(IGNORED_FIELDS, "accepted for OpenAI's clients and ignored")

# Fields of A1111's bodies.
_DESCRIPTIONS_A1111 = A1111_DESCRIPTIONS | {
    "sd_model_checkpoint": "the model of later requests of this API: a title of `sd-models`, a name or a fingerprint",
    "samples_format": "the file format of later requests of this API: `png`, `webp` or `jpg`",
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
    RecoveredSettings,
    Txt2Img,
    Txt2ImgResponse,
    Options,
    ProgressResponse,
    JobRequestBody,
    Job,
    JobList,
    ErrorBody,
)

_EXAMPLES: dict[str, dict[str, Any]] = {
    "ImageRequestBody": {"prompt": "a red circle above a blue square", "seed": 7},
    "GenerationsRequestBody": {"prompt": "a red circle above a blue square", "n": 2, "output_format": "webp"},
    "Txt2Img": {"prompt": "a red circle above a blue square", "sampler_name": "Euler", "steps": 20, "seed": -1},
    "Options": {"samples_format": "png"},
    "JobRequestBody": {"input": {"prompt": "a red circle above a blue square", "seed": 7}},
}


def openapi(spec: ModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
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
            "description": "Images from text. " + (f"Serving {spec.name}." if spec else "The model is still loading."),
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
    """Add to `paths` which operations need an API key, and the error without one."""
    for path, item in paths.items():
        if path in OPEN_PATHS:
            continue
        for operation_object in item.values():
            operation_object["security"] = [{name: []} for name in _SECURITY_SCHEMES]
            operation_object["responses"] |= error_responses([Unauthorized])


def _schemas(spec: ModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    for body in (ImageRequestBody, GenerationsRequestBody):
        schema = schemas[body.__name__]
        schema["example"] = _EXAMPLES[body.__name__]
        for name, field in schema["properties"].items():
            field["description"] = DESCRIPTIONS[name]
        for name in ("prompt", "negative_prompt"):
            schema["properties"][name]["maxLength"] = config.max_prompt_chars
        if spec is not None:
            _add_model_bounds(schema["properties"], spec, config)
    for other, descriptions in (
        (Txt2Img, _DESCRIPTIONS_A1111),
        (Options, _DESCRIPTIONS_A1111),
        (JobRequestBody, _DESCRIPTIONS_JOBS),
    ):
        schema = schemas[other.__name__]
        schema["example"] = _EXAMPLES[other.__name__]
        for name, field in schema["properties"].items():
            field["description"] = descriptions[name]
    return schemas


def _add_model_bounds(properties: dict[str, Any], spec: ModelSpec, config: FrontendConfig) -> None:
    """Add the model's bounds, defaults and schedulers to the fields of one body."""
    for name, allowed in limits(spec, config).items():
        if name not in properties:
            continue
        json_type = "number" if name == "guidance_scale" else "integer"
        nullable = "anyOf" in properties[name]
        properties[name] = {
            "type": [json_type, "null"] if nullable else json_type,
            "description": properties[name]["description"],
        }
        properties[name] |= {"minimum": allowed.min, "maximum": allowed.max}
        if allowed.multiple > 1:
            properties[name]["multipleOf"] = allowed.multiple
        if allowed.default is not None:
            properties[name]["default"] = allowed.default
    properties["scheduler"] |= {"default": spec.default_scheduler, "examples": list(spec.schedulers)}


def _paths() -> dict[str, Any]:
    return {
        "/t2i": {
            "post": operation(
                "Generate images",
                "One image is returned as a file, with its seed in X-Noria-Seed and its timings in Server-Timing; "
                "several, or one for a client that accepts JSON but no image, as JSON.",
                body=ImageRequestBody,
                content=IMAGE_CONTENT | json_content(ImagesResponse),
            )
        },
        "/v1/images/generations": {
            "post": operation(
                "Generate images with OpenAI's API",
                "The unmodified OpenAI clients work; send Noria's own fields in `extra_body`.",
                body=GenerationsRequestBody,
                content=json_content(GenerationsResponse),
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
                content=json_content(ModelDetail),
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
                content={"text/event-stream": {}},
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [parameter("thumbnails", "query")]}
        },
        **a1111_paths(),
        "/healthz": get_only("Check liveness", "200 as long as the process responds.", "application/json"),
        "/readyz": get_only(
            "Check readiness",
            "200 if an engine is ready, else 503; the body has the state of each engine.",
            "application/json",
        ),
        "/metrics": get_only("Get the metrics", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": get_only("Get this document", "OpenAPI 3.1.", "application/json"),
        "/docs": get_only(
            "Read the documentation of this API", "One page that loads nothing from other servers.", "text/html"
        ),
        "/live": get_only(
            "Open the live view", "A page with the running batch, its queue and its statistics.", "text/html"
        ),
        "/": get_only("Open the playground", "A page that generates images.", "text/html"),
    }


def _image_metadata_operation() -> dict[str, Any]:
    described = operation(
        "Read an image file's settings",
        f"The body is the file, at most {MAX_BYTES // 2**20} MiB of PNG, WebP or JPEG with the metadata of Noria or "
        "A1111. `settings` is a body of `POST /t2i`; `rejected` has the settings that this server does not support, "
        "with reasons.",
        content=json_content(RecoveredSettings),
        errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, EngineUnavailable],
    )
    return described | {"requestBody": {"required": True, "content": IMAGE_CONTENT}}
