"""Where spans are brought, if anywhere: `traces_endpoint`, checked before any process starts, opened by each of them.

Only here, and only where there is one, `otlp.py` is imported, the one module that knows OpenTelemetry.
"""

import importlib
from urllib.parse import urlsplit

from noria.errors import ConfigError, short_repr
from noria.observe.traces.tracer import NO_TRACER, Tracer

EXTRA = "noria-serve[traces]"


def check_traces(endpoint: str) -> None:
    """Whether spans can be brought there, as far as this machine can tell; nothing to do where `endpoint` is empty.

    Raises:
        ConfigError: it is no URL of a collector, it holds a password, or what it takes is not installed.

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
            f"setting traces_endpoint is {short_repr(endpoint)}; allowed is an http or https URL, such as http://127.0.0.1:4318/v1/traces."
        )
    if "@" in parts.netloc:  # not shown
        raise ConfigError(
            "setting traces_endpoint holds a user or a password, and process listings would show it. Leave it out of the URL, and put it "
            "into the environment: OTEL_EXPORTER_OTLP_HEADERS='authorization=Basic …'."
        )
    try:
        importlib.import_module("noria.observe.traces.otlp")
    except ImportError as error:
        raise ConfigError(
            f"setting traces_endpoint needs OpenTelemetry, which is not installed ({error}). "
            f"Run: pip install '{EXTRA}' (or leave traces_endpoint empty: no traces)."
        ) from error


def open_tracer(endpoint: str, ratio: float, instance: str) -> Tracer:
    """A tracer of the process called `instance`, which samples `ratio` of the traces that begin here. Raises ConfigError as `check_traces`."""
    check_traces(endpoint)
    if not endpoint:
        return NO_TRACER
    from noria.observe.traces.otlp import OtlpTracer

    return OtlpTracer(endpoint, ratio, instance)
