"""The HTTP interface as an OpenAPI 3.1 document: shapes from the msgspec structs, bounds and defaults from the model served.

Nothing is written twice: a struct's field is here because it is in the struct, a bound because `admission.limits` enforces it, an
error code because `noria.errors` has it. Only the descriptions are this module's own; a test asks for one for every field.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from noria import __version__
from noria.config import FrontendConfig
from noria.errors import (
    BodyTooLarge,
    EngineUnavailable,
    InvalidBody,
    InvalidField,
    JobNotFound,
    JobsUnavailable,
    MethodNotAllowed,
    ModelNotFound,
    NoriaError,
    RateLimited,
    RouteNotFound,
    SetupError,
    Unauthorized,
    UnreadableImage,
    all_codes,
)
from noria.frontend.a1111 import ROOT, Options, ProgressAnswer, Txt2ImgAnswer
from noria.frontend.a1111_bodies import DESCRIPTIONS as A1111_DESCRIPTIONS
from noria.frontend.a1111_bodies import Txt2Img
from noria.frontend.admission import limits
from noria.frontend.images import ImagesAnswer
from noria.frontend.jobs import JobBody, JobList
from noria.frontend.keys import OPEN_PATHS
from noria.frontend.openai import IGNORED, GenerationsAnswer, GenerationsBody, ModelCard, ModelDetail, ModelList
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
        for operation in item.values():
            operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]
            operation["responses"] |= _error_responses([Unauthorized])


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
            "post": _operation(
                "Draw images",
                "One image as a file, with its seed in X-Noria-Seed and its times in Server-Timing; "
                "several, or one for a client that accepts JSON but no image, as JSON.",
                body=ImageBody,
                answers={f"image/{name}": {} for name in ("png", "webp", "jpeg")} | _json(ImagesAnswer),
            )
        },
        "/v1/images/generations": {
            "post": _operation(
                "Draw images, as OpenAI's API does",
                "The unmodified OpenAI clients work; Noria's own fields go in `extra_body`.",
                body=GenerationsBody,
                answers=_json(GenerationsAnswer),
            )
        },
        "/v1/images/parameters": {"post": _recall()},
        "/v1/models": {
            "get": _operation(
                "List the models served",
                "As OpenAI's API does; `noria` says what may be asked of each: bounds, defaults, schedulers.",
                answers=_json(ModelList),
                errors=[EngineUnavailable],
            )
        },
        "/v1/models/{model}": {
            "get": _operation(
                "Tell of one model",
                "OpenAI's card, and what the model's work costs on the engines here.",
                answers=_json(ModelDetail),
                errors=[ModelNotFound, EngineUnavailable],
            )
            | {"parameters": [_parameter("model", "path")]}
        },
        **_job_paths(),
        "/v1/live": {
            "get": _operation(
                "Watch the batch",
                "Server-sent events: `engines`, the state of each, at every change; `wheel`, up to five times a second for each: who is in "
                "which slot, who waits, the last turns, and what the images are going to be, unless `pictures` is false. Without an end.",
                answers={"text/event-stream": {}},
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [_parameter("pictures", "query")]}
        },
        **_a1111_paths(),
        "/healthz": _plain("Tell that the process lives", "200 as long as it answers at all.", "application/json"),
        "/readyz": _plain(
            "Tell whether a request would be taken",
            "200 if an engine is ready, else 503; tells each one's state.",
            "application/json",
        ),
        "/metrics": _plain("Measure", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": _plain("Describe this interface", "OpenAPI 3.1.", "application/json"),
        "/docs": _plain("Describe it to people", "One page, nothing loaded from elsewhere.", "text/html"),
        "/live": _plain("Watch the wheel", "A page of the running batch, its queue and its figures.", "text/html"),
        "/": _plain("Draw in a browser", "The playground.", "text/html"),
    }


def _recall() -> dict[str, Any]:
    operation = _operation(
        "Read an image file's settings",
        f"The body is the file, at most {MOST_BYTES // 2**20} MiB of PNG, WebP or JPEG, of Noria or with A1111's text. "
        "`settings` is a body of `POST /t2i`; `unusable` says what of the file cannot be had here, and why.",
        answers=_json(Recalled),
        errors=[InvalidBody, BodyTooLarge, UnreadableImage, EngineUnavailable],
    )
    image: dict[str, Any] = {f"image/{name}": {} for name in ("png", "webp", "jpeg")}
    return operation | {"requestBody": {"required": True, "content": image}}


def _job_paths() -> dict[str, Any]:
    unknown = [JobNotFound, JobsUnavailable]
    one = [_parameter("id", "path")]
    accepting = _operation(
        "Have images drawn later",
        "Answered at once with 202; the job survives the end of any process. With an `Idempotency-Key` that was sent before, "
        "200 and the job that it has made.",
        body=JobBody,
        answers=_json(Job),
    )
    accepting["responses"]["202"] = {"description": "accepted", "content": _json(Job)}
    return {
        "/v1/jobs": {
            "post": accepting | {"parameters": [_parameter("Idempotency-Key", "header")]},
            "get": _operation(
                "List jobs",
                "Newest first; `next` is the next page's address.",
                answers=_json(JobList),
                errors=[InvalidField, JobsUnavailable],
            )
            | {"parameters": [_parameter("limit", "query"), _parameter("cursor", "query")]},
        },
        "/v1/jobs/{id}": {
            "get": _operation("Tell of a job", "As Replicate's predictions.", answers=_json(Job), errors=unknown)
            | {"parameters": one},
            "delete": _operation(
                "Cancel a job",
                "Its images leave the batch; a job that has ended stays.",
                answers=_json(Job),
                errors=unknown,
            )
            | {"parameters": one},
        },
        "/v1/jobs/{id}/events": {
            "get": _operation(
                "Watch a job",
                "Events `status` and `progress` until it has ended, from the one after Last-Event-ID on.",
                answers={"text/event-stream": {}},
                errors=[InvalidField, *unknown],
            )
            | {"parameters": [*one, _parameter("Last-Event-ID", "header")]}
        },
        "/v1/jobs/{id}/images/{index}": {
            "get": _operation(
                "Fetch an image of a job",
                "Until the job's time to live is over.",
                answers={f"image/{name}": {} for name in ("png", "webp", "jpeg")},
                errors=unknown,
            )
            | {"parameters": [*one, _parameter("index", "path")]}
        },
    }


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _a1111_paths() -> dict[str, Any]:
    lists = {
        "sd-models": "the models served",
        "samplers": "the samplers of the model that is set",
        "schedulers": "its schedule types",
        "upscalers": "no upscaler",
        "latent-upscale-modes": "none",
        "sd-vae": "none beside the models' own",
        "loras": "none",
    }
    return {
        f"{ROOT}/txt2img": {
            "post": _operation(
                "Draw images, as A1111's API does",
                "Bounds are those of `/t2i`. What A1111 has and Noria has not is refused unless it is off.",
                body=Txt2Img,
                answers=_json(Txt2ImgAnswer),
            )
        },
        f"{ROOT}/options": {
            "get": _operation(
                "Tell the settings of A1111's routes", "Those that mean something.", answers=_json(Options)
            ),
            "post": _operation(
                "Change them", "For all users of A1111's routes.", body=Options, answers={"application/json": {}}
            ),
        },
        f"{ROOT}/progress": {
            "get": _operation(
                "Tell how far A1111's clients' requests are",
                "Of the one that has been drawn for longest; `?skip_current_image=true` leaves its picture out.",
                answers=_json(ProgressAnswer),
            )
        },
        f"{ROOT}/interrupt": {
            "post": _operation(
                "End all requests of A1111's clients",
                "They are answered 499; those that came by other routes go on.",
                answers={"application/json": {}},
            )
        },
        f"{ROOT}/skip": {
            "post": _operation(
                "End one request of A1111's clients",
                "The one that has been drawn for longest.",
                answers={"application/json": {}},
            )
        },
    } | {
        f"{ROOT}/{name}": _plain("List, as A1111's API does", what.capitalize() + ".", "application/json")
        for name, what in lists.items()
    }


def _operation(
    summary: str,
    description: str,
    *,
    answers: dict[str, Any],
    body: type[Struct] | None = None,
    errors: Sequence[type[NoriaError]] = (),
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "description": description,
        "responses": {"200": {"description": "done", "content": answers}} | _error_responses(errors),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
        of_routing = (RouteNotFound, MethodNotAllowed)
        operation["responses"] |= _error_responses([kind for kind in served_errors() if kind not in of_routing])
    return operation


def _plain(summary: str, description: str, media_type: str) -> dict[str, Any]:
    return {"get": _operation(summary, description, answers={media_type: {}})}


def _error_responses(errors: Sequence[type[NoriaError]]) -> dict[str, Any]:
    by_status: dict[int, list[type[NoriaError]]] = {}
    for kind in errors:
        by_status.setdefault(kind.http_status, []).append(kind)
    return {
        str(status): {
            "description": "; ".join(f"`{kind.code}`: {first_line(kind)}" for kind in kinds),
            "content": _json(ErrorAnswer),
        }
        for status, kinds in sorted(by_status.items())
    }


def served_errors() -> list[type[NoriaError]]:
    """The kinds of error that a response can carry, by status and code."""
    kinds = [kind for kind in all_codes().values() if not issubclass(kind, SetupError)]
    return sorted(kinds, key=lambda kind: (kind.http_status, kind.code))


def first_line(kind: type[NoriaError]) -> str:
    """What an error means, from its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def _json(kind: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
