"""The registry in the OpenAPI document."""

from typing import Any

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RateLimited,
    RegistryConflict,
    RegistryUnavailable,
    SourceRejected,
    UnreadableImage,
)
from noria.frontend.http.paths import REGISTRY_PATH
from noria.frontend.openapi.operations import IMAGE_CONTENT, json_content, operation, parameter
from noria.frontend.routes.registry.registry import (
    DEFAULT_NODES,
    DEFAULT_VERSIONS,
    MAX_NODES,
    MAX_VERSIONS,
    AddVersionBody,
    ImageLineage,
)
from noria.frontend.services.registry.served_versions import ServedVersions
from noria.registry.lineage.graph import LineageGraph
from noria.registry.lineage.trace_subjects import MAX_CHARS
from noria.registry.version_list import VersionList
from noria.registry.versions import Version

STRUCTS = (AddVersionBody, Version, VersionList, ServedVersions, LineageGraph, ImageLineage)

DESCRIPTIONS = {
    "model": "the model; it is created if it is new",
    "source": "bundled, minilm, hf://OWNER/NAME[@REVISION], mlflow:models:/NAME@ALIAS, mlflow:models:/NAME/NUMBER, or "
    "a folder or URL below one of `registry.source_roots`",
    "alias": "let it name this version",
    "run_id": "the run that made it, if its events do not name its digest",
    "datasets": "URI@VERSION of data that it was made from",
    "why": "the reason, which is kept",
}

EXAMPLE = {"model": "shapes", "source": "hf://org/shapes@v1", "alias": "prod"}


def page_parameters(default: int, maximum: int) -> list[dict[str, Any]]:
    """Return the parameters of a list in pages."""
    limit = parameter("limit", "query", type="integer", minimum=1, maximum=maximum, default=default)
    return [limit, parameter("before", "query", type="integer", minimum=1, maximum=2**53)]


def text_parameter(name: str) -> dict[str, Any]:
    """Return a parameter that a request must have."""
    return parameter(name, "query", minLength=1, maxLength=MAX_CHARS, pattern=r"^[^\u0000]*$") | {"required": True}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    versions = operation(
        "List the versions of models",
        "The latest first, removed ones included, with the deployments that name each. `next` is the `before` of the "
        "next page.",
        content=json_content(VersionList),
        errors=[InvalidField, RegistryUnavailable],
    )
    add = operation(
        "Add a version of a model",
        "As `noria models add` does: reads the source, copies what is not on the server's machine, and registers the "
        "content as a version. It takes as long as that takes; if the connection breaks, it goes on, and the same "
        "request waits for it or finds the version.",
        body=AddVersionBody,
        content=json_content(Version),
        errors=[InvalidBody, InvalidField, RegistryConflict, SourceRejected, RateLimited, RegistryUnavailable],
    )
    add["responses"]["201"] = {"description": "added", "content": json_content(Version)}
    served = operation(
        "List the versions that are served",
        "What each engine holds, and how many requests each version answered since the server's start. Needs no "
        "database.",
        content=json_content(ServedVersions),
    )
    limit = parameter("limit", "query", type="integer", minimum=1, maximum=MAX_NODES, default=DEFAULT_NODES)
    traced = operation(
        "Trace what made something, and what was made from it",
        "`of` is what `noria trace` takes, or the `id` of a node. `limit` is of the nodes in each direction.",
        content=json_content(LineageGraph),
        errors=[InvalidField, RegistryConflict, RegistryUnavailable],
    )
    traced_image = operation(
        "Trace what made an image file",
        "The body is the file, with the metadata of Noria.",
        content=json_content(ImageLineage),
        errors=[
            InvalidBody,
            InvalidField,
            RegistryConflict,
            BodyTooLarge,
            UnreadableImage,
            RateLimited,
            RegistryUnavailable,
        ],
    )
    return {
        f"{REGISTRY_PATH}/versions": {
            "get": versions | {"parameters": page_parameters(DEFAULT_VERSIONS, MAX_VERSIONS)},
            "post": add,
        },
        f"{REGISTRY_PATH}/served": {"get": served},
        f"{REGISTRY_PATH}/trace": {
            "get": traced | {"parameters": [text_parameter("of"), limit]},
            "post": traced_image | {"parameters": [limit], "requestBody": {"required": True, "content": IMAGE_CONTENT}},
        },
    }
