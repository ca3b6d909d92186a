"""Paths that authentication, access logs and traces treat differently from all others."""

from noria.frontend.access.api_keys import KeyScope

OPEN_INFERENCE_ROOT = "/v2"
"""The path of the Open Inference Protocol; its other paths begin with it and a slash. Its errors are texts."""

HEALTH_PATHS = frozenset(
    {"/healthz", "/health", "/readyz"} | {f"{OPEN_INFERENCE_ROOT}/health/{name}" for name in ("live", "ready")}
)
"""The routes of probes."""

OPEN_PATHS = HEALTH_PATHS | {"/metrics", "/openapi.json", "/docs", "/live", "/text", "/"}
OPEN_PATHS |= {"/models", "/deployments", "/lineage", "/drift"}
"""Paths whose GET needs no API key: none creates, lists or returns images or results."""

ASSETS_PATH = "/pages"
"""The files of the pages are served at /pages/NAME, also without a key."""

A1111_ROOT = "/sdapi/v1"
"""The routes of AUTOMATIC1111's API begin with it; their errors carry `detail`."""

A1111_CONTROLNET_ROOT = "/controlnet"
"""Those of its ControlNet extension; likewise."""

TEI_PATHS = frozenset({"/", "/embed", "/predict", "/rerank", "/similarity", "/tokenize", "/info", "/health"})
"""The routes of text-embeddings-inference, whose errors have its own form; GET / is a page."""

METRICS_TARGETS_PATH = "/metrics/targets"
"""Where Prometheus finds the replicas of a server on Ray. Their addresses are for keys only, unlike metrics."""

LINEAGE_PATH = "/api/v1/lineage"
"""OpenLineage's path, to which its clients post."""

DEPLOYMENTS_PATH = "/v1/deployments"

STATISTICS_PATH = "/v1/statistics"

REGISTRY_PATH = "/v1/registry"
"""What the registry's pages show."""

_SCOPES: dict[str, KeyScope | None] = {
    "/t2i": "generate",
    "/v1/images/": "generate",
    "/v1/embeddings": "generate",
    "/embed": "generate",
    "/predict": "generate",
    "/rerank": "generate",
    "/similarity": "generate",
    "/tokenize": "generate",
    "/info": None,
    "/v1/endpoints/": "generate",
    f"{A1111_ROOT}/": "generate",
    f"{A1111_CONTROLNET_ROOT}/": "generate",
    OPEN_INFERENCE_ROOT: "generate",
    "/v1/jobs": "jobs",
    "/v1/models": None,
    "/v1/live": None,
    METRICS_TARGETS_PATH: "metrics",
    LINEAGE_PATH: "registry",
    DEPLOYMENTS_PATH: "registry",
    STATISTICS_PATH: "registry",
    f"{REGISTRY_PATH}/": "registry",
}  # by the beginning of the path


def is_open(method: str, path: str) -> bool:
    """Return whether a route needs no API key. POST / is a route of text-embeddings-inference."""
    return path in OPEN_PATHS and method != "POST"


def needed_scope(path: str) -> KeyScope | None:
    """Return the scope that an API key needs for a route that is not open; None: any key may use it."""
    if path == "/":
        return "generate"
    (scope,) = (scope for beginning, scope in _SCOPES.items() if path.startswith(beginning))
    return scope
