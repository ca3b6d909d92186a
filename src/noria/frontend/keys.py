"""Who asks: the API key that came with a request, and what its owner may still do. Pure: `now` is an argument.

Limits hold for one front-end process, which knows nothing of the others: of several, each grants its share.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence

from noria.errors import Unauthorized
from noria.keys import Key, digest_of

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/"})
"""What needs no key: nothing there makes, lists or shows images."""


class Caller:
    """Whoever has one key; without any keys, everybody together."""

    def __init__(self, key: Key | None) -> None:
        self.name = None if key is None else key.name


class Callers:
    """All who have a key. There is one `Caller` for each in the life of a process."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._by_digest = [(key.sha256, Caller(key)) for key in keys]
        self._everybody = None if keys else Caller(None)

    def find(self, headers: Mapping[str, str]) -> Caller:
        """Whose key is in `headers`, which are lower-case.

        All digests are compared, each in constant time: how long it takes tells nothing.

        Raises:
            Unauthorized: there is none, or it is not known.

        """
        if self._everybody is not None:
            return self._everybody
        presented = presented_key(headers)
        if presented is None:
            raise Unauthorized(
                "this server needs an API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`, or KEY as the password of Basic "
                "authentication."
            )
        digest = digest_of(presented)
        matches = [caller for known, caller in self._by_digest if hmac.compare_digest(digest, known)]
        if not matches:
            raise Unauthorized("the API key is not known here; ask who runs this server for one.")
        return matches[0]


def presented_key(headers: Mapping[str, str]) -> bytes | None:
    """The key in `headers`: X-Api-Key, which a proxy's own authentication leaves alone; else in Authorization; None without one."""
    if (own := headers.get("x-api-key")) is not None:
        return own.strip().encode("latin-1")
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip().encode("latin-1")
        case "basic":
            return _password(rest.strip())
    return None


def _password(credentials: str) -> bytes | None:
    """The password of Basic authentication (RFC 7617): what is after the first colon, whatever the user is called."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):  # not base64, not ASCII
        return None
