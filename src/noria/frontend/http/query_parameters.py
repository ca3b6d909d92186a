"""Parameters in the query of a request's URL."""

import re

from starlette.requests import Request

from noria.errors import InvalidField, short_repr


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
