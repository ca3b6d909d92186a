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
from noria.frontend.a1111 import Options, ProgressAnswer, Txt2ImgAnswer
from noria.frontend.a1111_bodies import DESCRIPTIONS as A1111_DESCRIPTIONS
from noria.frontend.a1111_bodies import Txt2Img
from noria.frontend.admission import limits
from noria.frontend.images import ImagesAnswer
from noria.frontend.jobs import JobBody, JobList
from noria.frontend.keys import OPEN_PATHS
from noria.frontend.openai import IGNORED, GenerationsAnswer, GenerationsBody, ModelCard, ModelDetail, ModelList
from noria.frontend.openapi_a1111 import a1111_paths
from noria.frontend.openapi_jobs import job_paths
from noria.frontend.openapi_parts import error_responses, json_of, operation, parameter, plain
from noria.frontend.recall import MOST_BYTES, Recalled
from noria.frontend.refusals import ErrorAnswer
from noria.jobs.records import Job
from noria.request import ImageBody
from noria.spec import ModelSpec

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
} | dict.fromkeys(IGNORED, "accepted for OpenAI's clients, and ignored")

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
    ImageBody,
    ImagesAnswer,
    GenerationsBody,
    GenerationsAnswer,
    ModelList,
    ModelCard,
    ModelDetail,
    Recalled,
    Txt2Img,
    Txt2ImgAnswer,
    Options,
    ProgressAnswer,
    JobBody,
    Job,
    JobList,
    ErrorAnswer,
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
        _lock(paths)
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


def _lock(paths: dict[str, Any]) -> None:
    """Write into `paths` which operations need a key, and what becomes of them without."""
    for path, item in paths.items():
        if path in OPEN_PATHS:
            continue
        for described in item.values():
            described["security"] = [{name: []} for name in _SECURITY_SCHEMES]
            described["responses"] |= error_responses([Unauthorized])


def _schemas(spec: ModelSpec | None, config: FrontendConfig) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    for body in (ImageBody, GenerationsBody):
        schema = schemas[body.__name__]
        schema["example"] = _EXAMPLES[body.__name__]
        for name, field in schema["properties"].items():
            field["description"] = DESCRIPTIONS[name]
        for name in ("prompt", "negative_prompt"):
            schema["properties"][name]["maxLength"] = config.max_prompt_chars
        if spec is not None:
            _fill_in(schema["properties"], spec, config)
    for other, descriptions in (
        (Txt2Img, _DESCRIPTIONS_A1111),
        (Options, _DESCRIPTIONS_A1111),
        (JobBody, _DESCRIPTIONS_JOBS),
    ):
        schema = schemas[other.__name__]
        schema["example"] = _EXAMPLES[other.__name__]
        for name, field in schema["properties"].items():
            field["description"] = descriptions[name]
    return schemas


def _fill_in(properties: dict[str, Any], spec: ModelSpec, config: FrontendConfig) -> None:
    """Write the model's bounds, defaults and schedulers into the fields of one body."""
    for name, allowed in limits(spec, config).items():
        if name not in properties:
            continue
        kind = "number" if name == "guidance_scale" else "integer"
        nullable = "anyOf" in properties[name]
        properties[name] = {
            "type": [kind, "null"] if nullable else kind,
            "description": properties[name]["description"],
        }
        properties[name] |= {"minimum": allowed.least, "maximum": allowed.most}
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
                body=ImageBody,
                answers={f"image/{name}": {} for name in ("png", "webp", "jpeg")} | json_of(ImagesAnswer),
            )
        },
        "/v1/images/generations": {
            "post": operation(
                "Draw images, as OpenAI's API does",
                "The unmodified OpenAI clients work; Noria's own fields go in `extra_body`.",
                body=GenerationsBody,
                answers=json_of(GenerationsAnswer),
            )
        },
        "/v1/images/parameters": {"post": _recall()},
        "/v1/models": {
            "get": operation(
                "List the models served",
                "As OpenAI's API does; `noria` says what may be asked of each: bounds, defaults, schedulers.",
                answers=json_of(ModelList),
                errors=[EngineUnavailable],
            )
        },
        "/v1/models/{model}": {
            "get": operation(
                "Tell of one model",
                "OpenAI's card, and what the model's work costs on the engines here.",
                answers=json_of(ModelDetail),
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
                answers={"text/event-stream": {}},
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [parameter("pictures", "query")]}
        },
        **a1111_paths(),
        "/healthz": plain("Tell that the process lives", "200 as long as it answers at all.", "application/json"),
        "/readyz": plain(
            "Tell whether a request would be taken",
            "200 if an engine is ready, else 503; tells each one's state.",
            "application/json",
        ),
        "/metrics": plain("Measure", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": plain("Describe this interface", "OpenAPI 3.1.", "application/json"),
        "/docs": plain("Describe it to people", "One page, nothing loaded from elsewhere.", "text/html"),
        "/live": plain("Watch the wheel", "A page of the running batch, its queue and its figures.", "text/html"),
        "/": plain("Draw in a browser", "The playground.", "text/html"),
    }


def _recall() -> dict[str, Any]:
    described = operation(
        "Read an image file's settings",
        f"The body is the file, at most {MOST_BYTES // 2**20} MiB of PNG, WebP or JPEG, of Noria or with A1111's text. "
        "`settings` is a body of `POST /t2i`; `unusable` says what of the file cannot be had here, and why.",
        answers=json_of(Recalled),
        errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, EngineUnavailable],
    )
    image: dict[str, Any] = {f"image/{name}": {} for name in ("png", "webp", "jpeg")}
    return described | {"requestBody": {"required": True, "content": image}}
