"""The HTTP API as an OpenAPI 3.1 document: schemas from the msgspec structs, bounds and defaults from the model served.

Schemas come from the structs, bounds from `request_validation.limits`, which enforces them, error codes from
`noria.errors`. Only the descriptions are written beside this module, and what the structs' types do not say.
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
from noria.frontend.openapi import (
    a1111,
    deployments,
    embeddings,
    endpoints,
    images,
    jobs,
    lineage,
    open_inference,
    registry,
    statistics,
    tei,
)
from noria.frontend.openapi.operations import (
    EVENT_STREAM_CONTENT,
    IMAGE_CONTENT,
    add_bounds,
    error_responses,
    get_only,
    json_content,
    operation,
    parameter,
)
from noria.frontend.routes.a1111.bodies import Img2Img, Txt2Img
from noria.frontend.routes.a1111.routes import Img2ImgResponse, Options, ProgressResponse, Txt2ImgResponse
from noria.frontend.routes.images.metadata import MAX_BYTES, RecoveredSettings
from noria.frontend.routes.images.metadata import PATH as IMAGE_METADATA_PATH
from noria.frontend.routes.images.t2i import ImagesResponse
from noria.frontend.routes.jobs.inputs import JobRequestBody
from noria.frontend.routes.jobs.routes import JobList
from noria.frontend.routes.openai.edits import EditsFields
from noria.frontend.routes.openai.embeddings import EmbeddingsRequestBody, EmbeddingsResponse
from noria.frontend.routes.openai.images import GenerationsRequestBody, GenerationsResponse
from noria.frontend.routes.openai.models import EncoderDetail, ModelCard, ModelDetail, ModelList
from noria.frontend.routes.registry.deployments import DeploymentChangeBody, DeployRequestBody
from noria.frontend.routes.registry.registry import AddVersionBody
from noria.frontend.services.images.request_validation import limits
from noria.jobs.records import Job
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequestBody
from noria.protocol.text import EncoderModelSpec
from noria.registry.lineage.openlineage import LineageEventBody

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
    EditsFields,
    Txt2Img,
    Txt2ImgResponse,
    Img2Img,
    Img2ImgResponse,
    Options,
    ProgressResponse,
    JobRequestBody,
    Job,
    JobList,
    LineageEventBody,
    ErrorBody,
    *deployments.STRUCTS,
    *registry.STRUCTS,
    *statistics.STRUCTS,
    *tei.STRUCTS,
    *open_inference.STRUCTS,
)

_EXAMPLES: dict[str, dict[str, Any]] = {
    "ImageRequestBody": {"prompt": "a red circle above a blue square", "seed": 7},
    "GenerationsRequestBody": {"prompt": "a red circle above a blue square", "n": 2, "output_format": "webp"},
    "Txt2Img": {"prompt": "a red circle above a blue square", "sampler_name": "Euler", "steps": 20, "seed": -1},
    "EditsFields": {"prompt": "a blue circle above a blue square", "strength": 0.6},
    "Img2Img": {"prompt": "a blue circle", "init_images": [images.EXAMPLE_FILE], "denoising_strength": 0.6},
    "Options": {"samples_format": "png"},
    "EmbeddingsRequestBody": {"input": ["a red circle", "a blue square"]},
    "LineageEventBody": lineage.EXAMPLE,
    "AddVersionBody": registry.EXAMPLE,
    "DeployRequestBody": deployments.EXAMPLE,
    "DeploymentChangeBody": {"endpoint": "t2i"},
    "JobRequestBody": {"input": {"prompt": "a red circle above a blue square", "seed": 7}},
}


def openapi(
    spec: DiffusionModelSpec | None, config: FrontendConfig, embedding_spec: EncoderModelSpec | None = None
) -> dict[str, Any]:
    """Return the document; without the `spec` of a kind (no engine has been ready) it lacks that model's bounds."""
    paths = _paths(embedding_spec)
    components: dict[str, Any] = {"schemas": _schemas(spec, config, embedding_spec)}
    if config.api_keys_file:
        components["securitySchemes"] = _SECURITY_SCHEMES
        _require_keys(paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Noria",
            "version": __version__,
            "description": "Images from text, and embeddings of texts. " + _serving(spec),
        },
        "paths": paths,
        "components": components,
    }


def _serving(spec: DiffusionModelSpec | None) -> str:
    if spec is None:
        return "No image model is ready."
    needs = ", a model for inpainting: each of its requests needs an image and a mask" if spec.needs_mask else ""
    return f"Serving {spec.name}{needs}."


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


def _schemas(
    spec: DiffusionModelSpec | None, config: FrontendConfig, embedding_spec: EncoderModelSpec | None
) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    for body, descriptions in (
        (ImageRequestBody, images.DESCRIPTIONS),
        (GenerationsRequestBody, images.DESCRIPTIONS),
        (EditsFields, images.DESCRIPTIONS),
        (Txt2Img, a1111.DESCRIPTIONS),
        (Img2Img, a1111.DESCRIPTIONS),
        (Options, a1111.DESCRIPTIONS),
        (JobRequestBody, jobs.DESCRIPTIONS),
        (LineageEventBody, lineage.DESCRIPTIONS),
        (AddVersionBody, registry.DESCRIPTIONS),
        (DeployRequestBody, deployments.DESCRIPTIONS),
        (DeploymentChangeBody, deployments.DESCRIPTIONS),
        (EmbeddingsRequestBody, embeddings.DESCRIPTIONS),
    ):
        schema = schemas[body.__name__]
        schema["example"] = _EXAMPLES[body.__name__]
        properties: dict[str, Any] = schema["properties"]
        for name in {"prompt", "negative_prompt"} & properties.keys():
            properties[name]["maxLength"] = config.max_prompt_chars
        if spec is not None:
            for name, allowed in limits(spec, config).items():
                if name in properties:
                    add_bounds(properties[name], allowed)
        for name, field in properties.items():
            field["description"] = descriptions[name]
    images.add_to_schemas(schemas, spec)
    embeddings.add_to_schemas(schemas, config, embedding_spec)
    tei.add_to_schemas(schemas, config)
    open_inference.add_to_schemas(schemas)
    a1111.add_to_schemas(schemas, spec, config)
    jobs.add_to_schemas(schemas)
    lineage.add_to_schemas(schemas)
    return schemas


def _paths(embedding_spec: EncoderModelSpec | None) -> dict[str, Any]:
    return {
        **images.paths(),
        **embeddings.paths(),
        **endpoints.paths(),
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
        **jobs.paths(embedding_spec),
        "/v1/live": {
            "get": operation(
                "Stream the running batches",
                "Server-sent events without an end: `engines`, the state of each engine, at every change; "
                "`engine_view`, up to five times a second for each engine: its slots, queue, last iterations with "
                "the sizes that shared a model call and, unless `thumbnails` is false, thumbnails of its images.",
                content=EVENT_STREAM_CONTENT,
                errors=[InvalidField, RouteNotFound, RateLimited],
            )
            | {"parameters": [parameter("thumbnails", "query", type="boolean", default=True)]}
        },
        **lineage.paths(),
        **deployments.paths(),
        **registry.paths(),
        **statistics.paths(),
        **tei.paths(),
        **open_inference.paths(),
        **a1111.paths(),
        "/healthz": get_only("Check liveness", "200 as long as the process responds.", "application/json"),
        "/readyz": {"get": _readiness_operation()},
        "/metrics": get_only("Get the metrics", "Prometheus' text format, summed over all processes.", "text/plain"),
        "/openapi.json": get_only("Get this document", "OpenAPI 3.1.", "application/json"),
        "/docs": get_only(
            "Read the documentation of this API", "One page that loads nothing from other servers.", "text/html"
        ),
        "/drift": get_only("The page of drift", "Distributions beside their reference, and over time.", "text/html"),
        "/live": get_only(
            "Open the live view", "A page with the running batch, its queue and its statistics.", "text/html"
        ),
        "/text": get_only(
            "Open the playground of texts", "A page that embeds, classifies and ranks texts.", "text/html"
        ),
        "/models": get_only("Open the models", "A page with the versions of models in the registry.", "text/html"),
        "/deployments": get_only(
            "Open the deployments", "A page with the traffic of endpoints, canaries and their judge.", "text/html"
        ),
        "/lineage": get_only("Open the lineage", "A page with what made what, as a graph.", "text/html"),
        "/": get_only(
            "Open the playground", "A page that generates images; without an image model, as `/text`.", "text/html"
        )
        | {"post": tei.root()},
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
