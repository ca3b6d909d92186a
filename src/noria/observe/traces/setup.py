"""Sets up tracing: `traces_endpoint` is checked before any process starts, and each process opens a tracer.

`otlp.py`, the only module that imports OpenTelemetry's SDK, is imported here, and only if an endpoint is set.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry.trace import Tracer, TracerProvider, get_tracer_provider

from noria import __version__
from noria.errors import ConfigError, short_repr

EXTRA = "noria-serve[traces]"
_CLOSE_TIMEOUT_S = 1.5  # the supervisor waits at most 5 s for a child to end
# They warn of each invalid header of a client, which is ignored.
_PARSING_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")


def check_traces(endpoint: str) -> None:
    """Check that spans can be exported to `endpoint`, as far as possible without connecting; an empty one is valid.

    Raises ConfigError: it is no HTTP URL, it contains a user or password, or OpenTelemetry is not installed.
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


def open_tracer(endpoint: str, ratio: float, instance: str) -> tuple[Tracer, Callable[[], None]]:
    """Return the tracer of the process `instance`, which samples `ratio` of the traces that begin here, and `close`.

    Without an endpoint it is that of the global TracerProvider, which records nothing unless the operator has set one
    up. `close` exports the queued spans, for at most two seconds. Raises ConfigError as `check_traces`.
    """
    check_traces(endpoint)
    for name in _PARSING_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    provider = get_tracer_provider()
    if endpoint:
        from noria.observe.traces.otlp import open_otlp_provider

        provider = open_otlp_provider(endpoint, ratio, instance)
    return provider.get_tracer("noria", __version__), functools.partial(_close, provider)


def _close(provider: TracerProvider) -> None:
    """Shut `provider` down in bounded time: the SDK's own timeout does not hold if a collector does not respond."""
    if (shutdown := getattr(provider, "shutdown", None)) is not None:
        closing = threading.Thread(target=shutdown, name="trace exporter shutdown", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
