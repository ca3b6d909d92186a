"""What the registry's pages read, in the OpenAPI document."""

from typing import Any

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RateLimited,
    RegistryConflict,
    RegistryUnavailable,
    UnreadableImage,
)
from noria.frontend.http.paths import REGISTRY_PATH
from noria.frontend.openapi.operations import IMAGE_CONTENT, json_content, operation, parameter
from noria.frontend.routes.registry.registry import (
    DEFAULT_NODES,
    DEFAULT_VERSIONS,
    MAX_NODES,
    MAX_VERSIONS,
    ImageLineage,
)
from noria.frontend.services.served_versions import ServedVersions
from noria.registry.lineage.graph import LineageGraph
from noria.registry.lineage.trace_subjects import MAX_CHARS
from noria.registry.version_list import VersionList

STRUCTS = (VersionList, ServedVersions, LineageGraph, ImageLineage)


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
            "get": versions | {"parameters": page_parameters(DEFAULT_VERSIONS, MAX_VERSIONS)}
        },
        f"{REGISTRY_PATH}/served": {"get": served},
        f"{REGISTRY_PATH}/trace": {
            "get": traced | {"parameters": [text_parameter("of"), limit]},
            "post": traced_image | {"parameters": [limit], "requestBody": {"required": True, "content": IMAGE_CONTENT}},
        },
    }
