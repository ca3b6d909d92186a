"""The address of a server for commands that ask it: a URL that is given, or what the settings of `noria serve` say."""

import os
from urllib.parse import urlsplit

from noria.config import FrontendConfig
from noria.errors import ConfigError, short_repr

ADDRESS_SETTINGS = ("frontend.host", "frontend.port", "frontend.uds", "frontend.ssl_certfile")


def checked_url(text: str) -> str:
    """The URL of a server without a trailing slash, or `unix:PATH`. Raises ConfigError if `text` is neither."""
    if text.startswith("unix:/"):
        return text
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # an invalid port, an incomplete IPv6 address
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"the URL is {short_repr(text)}; it must have the form http://HOST:PORT, such as http://127.0.0.1:8000, "
            "or unix:/PATH for a Unix socket."
        )
    return text.rstrip("/")


def local_url(frontend: FrontendConfig) -> str:
    """The URL of the server that these settings start on this machine, of a Unix socket `unix:PATH`.

    Raises ConfigError if they name no fixed port.
    """
    if frontend.uds:
        return f"unix:{os.path.abspath(frontend.uds)}"
    if frontend.port == 0:
        raise ConfigError(
            "setting frontend.port is 0, which picks any free port: give the URL that `noria serve` printed."
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(frontend.host, frontend.host)  # noqa: S104 - not listened on
    scheme = "https" if frontend.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{frontend.port}" if ":" in host else f"{scheme}://{host}:{frontend.port}"
