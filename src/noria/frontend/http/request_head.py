"""The head of a request: its headers, the parameters of its URL, and the URL of the server that it names."""

import re

from starlette.requests import Request

from noria.errors import InvalidField, short_repr

_PREFIX = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*/?")
_MAX_URL_CHARS = 300  # a host name has at most 255


class RequestHeaders(dict[str, str]):
    """The values of headers by their names in lower case; of several with one name, the first."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__({name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)})
        self._raw = raw

    def getlist(self, name: str) -> list[str]:
        """Return the values of all headers with this name."""
        return [value.decode("latin-1") for each, value in self._raw if each.decode("latin-1") == name]


def read_number(http: Request, name: str, maximum: int) -> int | None:
    """Return a parameter that may be there, 1 to `maximum`. Raises InvalidField."""
    text = http.query_params.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,16}", text) or not 1 <= int(text) <= maximum:
        raise InvalidField(f"{name} is {short_repr(text)}; allowed are 1 to {maximum}.", field=name)
    return int(text)


def read_flag(http: Request, name: str, default: bool) -> bool:
    """Return a parameter that may be there, true or false. Raises InvalidField."""
    text = http.query_params.get(name)
    if text not in (None, "true", "false"):
        raise InvalidField(f"{name} is {short_repr(text)}; allowed are true, false.", field=name)
    return default if text is None else text == "true"


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
