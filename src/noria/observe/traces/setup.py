"""Sets up tracing: `traces_endpoint` is checked before any process starts, and each process opens a tracer.

`otlp.py`, the only module that imports OpenTelemetry, is imported here, and only if an endpoint is set.
"""

import importlib
from urllib.parse import urlsplit

from noria.errors import ConfigError, short_repr
from noria.observe.traces.tracer import NO_TRACER, Tracer

EXTRA = "noria-serve[traces]"


def check_traces(endpoint: str) -> None:
    """Check that spans can be exported to `endpoint`, as far as possible without connecting; an empty one is valid.

    Raises:
        ConfigError: it is no HTTP URL, it contains a user or password, or OpenTelemetry is not installed.

    """
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"setting traces_endpoint is {short_repr(endpoint)}; allowed is an http or https URL, "
            "such as http://127.0.0.1:4318/v1/traces."
        )
    if "@" in parts.netloc:  # the message does not show the URL
        raise ConfigError(
            "setting traces_endpoint contains a user or a password, which process listings would show. Remove it from "
            "the URL and set the environment variable OTEL_EXPORTER_OTLP_HEADERS='authorization=Basic …' instead."
        )
    try:
        importlib.import_module("noria.observe.traces.otlp")
    except ImportError as error:
        raise ConfigError(
            f"setting traces_endpoint needs OpenTelemetry, which is not installed ({error}). "
            f"Run: pip install '{EXTRA}' (or leave traces_endpoint empty: no traces)."
        ) from error


def open_tracer(endpoint: str, ratio: float, instance: str) -> Tracer:
    """Return the tracer of the process `instance`; it samples `ratio` of the traces that begin here.

    Without an endpoint it is `NO_TRACER`. Raises ConfigError as `check_traces`.
    """
    check_traces(endpoint)
    if not endpoint:
        return NO_TRACER
    from noria.observe.traces.otlp import OtlpTracer

    return OtlpTracer(endpoint, ratio, instance)
