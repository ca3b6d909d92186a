"""Deployments in the OpenAPI document."""

from typing import Any

from noria.errors import InvalidField, RegistryConflict, RegistryUnavailable
from noria.frontend.http.paths import DEPLOYMENTS_PATH
from noria.frontend.openapi.operations import json_content, operation
from noria.frontend.openapi.registry import page_parameters, text_parameter
from noria.frontend.routes.registry.deployments import (
    DEFAULT_HISTORY,
    MAX_HISTORY,
    DeploymentChangeBody,
    DeploymentList,
    DeployRequestBody,
)
from noria.registry.deployments.history import DeploymentHistory
from noria.registry.deployments.states import Deployment

STRUCTS = (DeployRequestBody, DeploymentChangeBody, DeploymentList, DeploymentHistory, Deployment)

DESCRIPTIONS = {
    "endpoint": "the name that requests give as `model`",
    "version": "MODEL, MODEL@NUMBER, MODEL@ALIAS or MODEL@KEY=VALUE; by a tag or a model alone the latest version",
    "canary": "per cent of the requests that it gets, until it is promoted or rolled back",
    "ramp": "a growing share, such as `5,25,50,100 every 10m`",
    "shadow": "first copies of this share of the requests, such as `20%`, `20% for 10m` or `20% for 500` (answers); "
    "they are compared and discarded",
    "swap": "unload what serves before the version is loaded, where memory does not hold both; requests to the "
    "endpoint get 503 meanwhile",
    "min_responses": "responses of a canary before it can fail; by default 80",
    "max_error_increase": "points by which the error rate of a canary that passes may be higher; by default 3",
    "guards": "counted variables, such as `image_brightness`, of which a canary that passes has the same distribution",
    "follow": "deploy each version that `version`, MODEL@ALIAS, MODEL@KEY=VALUE or MODEL, names later, too, until the "
    "next deployment without it",
    "why": "the reason, which is kept",
}

EXAMPLE = {"endpoint": "t2i", "version": "shapes@3", "ramp": "5,25,50,100 every 10m"}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    content = json_content(Deployment)
    deploy = operation(
        "Deploy a version",
        "Lets a version of the registry answer the requests to an endpoint: all of them, or a share as a canary. "
        "Running servers load it and move the traffic. The same request again changes nothing until that is finished.",
        body=DeployRequestBody,
        content=content,
    )
    deploy["responses"]["202"] = {"description": "accepted", "content": content}
    promote = operation(
        "Promote a canary or a shadow",
        "A canary answers all requests to the endpoint. A shadow becomes the canary of its plan; without a plan it "
        "answers all requests, too.",
        body=DeploymentChangeBody,
        content=content,
    )
    rollback = operation(
        "Roll a deployment back",
        "Takes away the latest one of the endpoint: a canary at once; instead of one that serves, the version that "
        "served before is deployed.",
        body=DeploymentChangeBody,
        content=content,
    )
    listing = operation(
        "List what is deployed",
        "For each endpoint the deployment that serves and the one that is not finished, with their events, and what "
        "the judge of a canary says.",
        content=json_content(DeploymentList),
        errors=[RegistryUnavailable],
    )
    history = operation(
        "List what happened to an endpoint",
        "Its deployments, the latest first, each with its events, and of canaries what the judge had seen and said at "
        "each. `next` is the `before` of the next page.",
        content=json_content(DeploymentHistory),
        errors=[InvalidField, RegistryConflict, RegistryUnavailable],
    )
    return {
        DEPLOYMENTS_PATH: {"get": listing, "post": deploy},
        f"{DEPLOYMENTS_PATH}/history": {
            "get": history
            | {"parameters": [text_parameter("endpoint"), *page_parameters(DEFAULT_HISTORY, MAX_HISTORY)]}
        },
        f"{DEPLOYMENTS_PATH}/promote": {"post": promote},
        f"{DEPLOYMENTS_PATH}/rollback": {"post": rollback},
    }
