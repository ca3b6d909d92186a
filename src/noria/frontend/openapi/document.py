"""The HTTP interface as an OpenAPI 3.1 document: shapes from the msgspec structs, bounds and defaults from the model served.

Nothing is written twice: a struct's field is here because it is in the struct, a bound because `admission.limits` enforces it, an
error code because `noria.errors` has it. Only the descriptions are this module's own; a test asks for one for every field.
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
from noria.frontend.http.error_body import ErrorBody
from noria.frontend.http.quotas import OPEN_PATHS
from noria.frontend.openapi.a1111 import a1111_paths
from noria.frontend.openapi.jobs import job_paths
from noria.frontend.openapi.operations import error_responses, get_only, json_content, operation, parameter
from noria.frontend.routes.a1111.bodies import DESCRIPTIONS as A1111_DESCRIPTIONS
from noria.frontend.routes.a1111.bodies import Txt2Img
from noria.frontend.routes.a1111.routes import Options, ProgressResponse, Txt2ImgResponse
from noria.frontend.routes.image_metadata import MAX_BYTES, RecoveredSettings
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
from noria.frontend.services.admission import limits
from noria.jobs.records import Job
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequestBody

DESCRIPTIONS = {
    "prompt": "what the image shows",
    "negative_prompt": "what it should not show; has an effect only with a guidance_scale above 1",
    "seed": "the same seed and settings draw the same image; image k of n takes seed + k; left out, one is drawn and told",
    "width": "in pixels",
    "height": "in pixels",
    "inference_steps": "denoising steps",
    "guidance_scale": "how strongly the prompt steers (classifier-free guidance); 1 or less is not at all, and half the work",
    "n": "number of images; more than one are answered in JSON",
    "scheduler": "the sampler, by its short name, an alias or its name in diffusers",
    "format": "the image file's format: webp is lossy at quality 90, jpeg at 95",
    "model": "the name of a model served, or `noria` for the first one",
    "size": "`WIDTHxHEIGHT` in pixels, or `auto` for the model's own",
    "output_format": "the image file's format",
    "output_compression": "quality of webp and jpeg, 0 to 100; nothing to png",
    "response_format": "`b64_json`; `url` is refused: images are stored for jobs only",
    "stream": "answer with events: how far it is, pictures on the way, the finished images",
    "partial_images": "pictures of each image on its way, in a stream",
    "priority": "`low`, `normal` or `high`: who boards first when there is a queue",
    "deadline_ms": "milliseconds from now after which the images are of no use: refused at once if that cannot be met",
    "metadata": "whether the files say how they were made",
} | dict.fromkeys(IGNORED_FIELDS, "accepted for OpenAI's clients, and ignored")

# Of the fields of A1111's bodies; its names are not ours.
_DESCRIPTIONS_A1111 = A1111_DESCRIPTIONS | {
    "sd_model_checkpoint": "the model of later requests by this route: a title of `sd-models`, a name, or a fingerprint",
    "samples_format": "the format of later images by this route: `png`, `webp` or `jpg`",
}

_DESCRIPTIONS_JOBS = {
    "input": 'the body of `POST /t2i`, or with `"endpoint": "/v1/images/generations"` in it that route\'s; a seed is drawn where it has none',
    "webhook": "where to POST the job when it starts and when it has ended, signed as Standard Webhooks has it",
    "webhook_events_filter": "which of `start` and `completed` the webhook is told; both by default",
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
    "ImageBody": {"prompt": "a red circle above a blue square", "seed": 7},
    "GenerationsBody": {"prompt": "a red circle above a blue square", "n": 2, "output_format": "webp"},
    "Txt2Img": {"prompt": "a red circle above a blue square", "sampler_name": "Euler", "steps": 20, "seed": -1},
    "Options": {"samples_format": "png"},
    "JobBody": {"input": {"prompt": "a red circle above a blue square", "seed": 7}},
}


def openapi(spec: ModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
    """The document; without a `spec` (no engine was ready yet) the model's bounds and defaults are missing from it."""
    paths = _paths()
    components: dict[str, Any] = {"schemas": _schemas(spec, config)}
    if config.keys_file:
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
    """Write into `paths` which operations need a key, and what becomes of them without."""
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
    """Write the model's bounds, defaults and schedulers into the fields of one body."""
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
                "Draw images",
                "One image as a file, with its seed in X-Noria-Seed and its times in Server-Timing; "
                "several, or one for a client that accepts JSON but no image, as JSON.",
                body=ImageRequestBody,
                content={f"image/{name}": {} for name in ("png", "webp", "jpeg")} | json_content(ImagesResponse),
            )
        },
        "/v1/images/generations": {
            "post": operation(
                "Draw images, as OpenAI's API does",
                "The unmodified OpenAI clients work; Noria's own fields go in `extra_body`.",
                body=GenerationsRequestBody,
                content=json_content(GenerationsResponse),
            )
        },
        "/v1/images/parameters": {"post": _image_metadata_operation()},
        "/v1/models": {
            "get": operation(
                "List the models served",
                "As OpenAI's API does; `noria` says what may be asked of each: bounds, defaults, schedulers.",
                content=json_content(ModelList),
                errors=[EngineUnavailable],
            )
        },
        "/v1/models/{model}": {
            "get": operation(
                "Tell of one model",
                "OpenAI's card, and what the model's work costs on the engines here.",
                content=json_content(ModelDetail),
                errors=[ModelNotFound, EngineUnavailable],
            )
            | {"parameters": [parameter("model", "path")]}
        },
        **job_paths(),
        "/v1/live": {
            "get": operation(
                "Watch the batch",
                "Server-sent events: `engines`, the state of each, at every change; `wheel`, up to five times a second for each: who is in "
                "which slot, who waits, the last turns, and what the images are going to be, unless `pictures` is false. Without an end.",
                content={"text/event-stream": {}},
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [parameter("pictures", "query")]}
        },
        **a1111_paths(),
        "/healthz": get_only("Tell that the process lives", "200 as long as it answers at all.", "application/json"),
        "/readyz": get_only(
            "Tell whether a request would be taken",
            "200 if an engine is ready, else 503; tells each one's state.",
            "application/json",
        ),
        "/metrics": get_only("Measure", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": get_only("Describe this interface", "OpenAPI 3.1.", "application/json"),
        "/docs": get_only("Describe it to people", "One page, nothing loaded from elsewhere.", "text/html"),
        "/live": get_only("Watch the wheel", "A page of the running batch, its queue and its figures.", "text/html"),
        "/": get_only("Draw in a browser", "The playground.", "text/html"),
    }


def _image_metadata_operation() -> dict[str, Any]:
    described = operation(
        "Read an image file's settings",
        f"The body is the file, at most {MAX_BYTES // 2**20} MiB of PNG, WebP or JPEG, of Noria or with A1111's text. "
        "`settings` is a body of `POST /t2i`; `unusable` says what of the file cannot be had here, and why.",
        content=json_content(RecoveredSettings),
        errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, EngineUnavailable],
    )
    image: dict[str, Any] = {f"image/{name}": {} for name in ("png", "webp", "jpeg")}
    return described | {"requestBody": {"required": True, "content": image}}
