"""The URL of the server as a client has addressed it."""

import re

from starlette.requests import Request

from noria.errors import InvalidField, short_repr

_PREFIX = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*/?")
_MAX_URL_CHARS = 300  # a host name has at most 255


def base_url(http: Request) -> str:
    """Return the URL of `/` as the client addressed it, below the path that a proxy names in X-Forwarded-Prefix.

    Of a list, which a chain of proxies makes, it is the first path. As Host, the header may be the client's own, and
    only its own responses have the URL. Raises InvalidField.
    """
    prefix = http.headers.get("x-forwarded-prefix", "").partition(",")[0].strip()
    if not _PREFIX.fullmatch(prefix):
        raise InvalidField(
            f"header X-Forwarded-Prefix is {short_repr(prefix)}; allowed is a path such as /images.",
            field="X-Forwarded-Prefix",
        )
    url = f"{str(http.base_url).rstrip('/')}{prefix.rstrip('/')}/"
    if len(url) > _MAX_URL_CHARS:
        sent = f"Host is {short_repr(http.headers.get('host'))}, X-Forwarded-Prefix {short_repr(prefix)}"
        raise InvalidField(f"header {sent}; together they have at most {_MAX_URL_CHARS} characters.", field="Host")
    return url
