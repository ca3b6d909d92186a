"""Who asks: the API key that came with a request, and what its owner may still do. Pure: `now` is an argument.

Limits hold for one front-end process, which knows nothing of the others: of several, each grants its share.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from noria.errors import InvalidField, RateLimited, Unauthorized, short_repr
from noria.frontend.http.api_keys import ApiKey, key_digest
from noria.protocol.request import ImageRequestBody, Priority

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/live", "/"})
"""What needs no key: nothing there makes, lists or shows images."""


_TOLERANCE_S = 1e-6  # sums of floats are not exact: who waits as long as he was told to must pass
_PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # from the lowest


class TokenBucket:
    """Images a minute: a token bucket that holds a minute's worth and begins full.

    Kept as the one time at which it will be full again (the generic cell rate algorithm, ITU-T I.371).
    """

    def __init__(self, images_per_minute: float) -> None:
        self.capacity = images_per_minute  # that can pass at once
        self._emission_interval_s = 60.0 / images_per_minute
        self._full_at = 0.0

    def take(self, num_images: int, now: float) -> float:
        """Let `num_images` pass, at most `most`, and return 0; or let none pass and return the seconds until they could."""
        full_at = max(self._full_at, now) + num_images * self._emission_interval_s
        wait_s = full_at - now - 60.0
        if wait_s > _TOLERANCE_S:
            return wait_s
        self._full_at = full_at
        return 0.0

    def refund(self, num_images: int) -> None:
        """Undo a `take`."""
        self._full_at -= num_images * self._emission_interval_s


class ApiClient:
    """Whoever has one key, and what he has under way; without any keys, everybody together and without limits."""

    def __init__(self, key: ApiKey | None, num_processes: int) -> None:
        self.name = None if key is None else key.name
        self._max_priority: Priority = "high" if key is None else key.priority
        self._max_in_flight: int | None = None
        self._token_bucket: TokenBucket | None = None
        self._num_in_flight = 0
        if key is not None and key.max_images_in_flight is not None:
            self._max_in_flight = max(1, key.max_images_in_flight // num_processes)
        if key is not None and key.images_per_minute is not None:
            self._token_bucket = TokenBucket(max(1.0, key.images_per_minute / num_processes))

    def apply_priority(self, body: ImageRequestBody) -> ImageRequestBody:
        """`body`, with the key's highest priority where the default would be above it.

        Raises:
            InvalidField: a priority that is not the key's, or more images than could ever pass at once.

        """
        if self._token_bucket is not None:
            self._check_size(body.n, int(self._token_bucket.capacity), "a minute")
        allowed = _PRIORITIES[: _PRIORITIES.index(self._max_priority) + 1]
        if body.priority is None:
            return body if "normal" in allowed else msgspec.structs.replace(body, priority=self._max_priority)
        if body.priority not in allowed:
            raise InvalidField(
                f"priority is {short_repr(body.priority)}; allowed for the key {self.name!r} are {', '.join(allowed)}.",
                field="priority",
            )
        return body

    def acquire(self, num_images: int, now: float, backlog_s: float) -> None:
        """Count images that are going to be drawn: `leave` has to follow. In `drain_s` those in flight are predicted to be done.

        Raises:
            InvalidField: more than may ever be in flight.
            RateLimited: more than the limits leave now; nothing is counted then.

        """
        if self._max_in_flight is not None:
            self._check_size(num_images, self._max_in_flight, "in flight")
            if self._num_in_flight + num_images > self._max_in_flight:
                raise RateLimited(
                    f"the key {self.name!r} has {self._num_in_flight} images in flight; with {num_images} more they would be over "
                    f"{self._max_in_flight}. Ask again when some are done.",
                    retry_after_s=backlog_s,
                )
        self.charge(num_images, now)
        self._num_in_flight += num_images

    def release(self, num_images: int) -> None:
        """The request that boarded has ended, however."""
        self._num_in_flight -= num_images

    def charge(self, num_images: int, now: float) -> None:
        """Count images for the rate alone; raises RateLimited."""
        if self._token_bucket is None:
            return
        if wait_s := self._token_bucket.take(num_images, now):
            raise RateLimited(
                f"the key {self.name!r} may ask for {self._token_bucket.capacity:g} images a minute; {num_images} more pass in {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )

    def refund(self, num_images: int) -> None:
        """Undo a `charge`: nothing came of it."""
        if self._token_bucket is not None:
            self._token_bucket.refund(num_images)

    def _check_size(self, num_images: int, max_images: int, what: str) -> None:
        if num_images > max_images:
            raise InvalidField(
                f"n is {num_images}; the key {self.name!r} has {max_images} images {what}: allowed are 1 to {max_images}.",
                field="n",
            )


class ClientDirectory:
    """All who have a key. There is one `Caller` for each in the life of a process."""

    def __init__(self, keys: Sequence[ApiKey], num_processes: int) -> None:
        """`num_processes` front ends share each key's limits."""
        self._by_digest = [(key.sha256, ApiClient(key, num_processes)) for key in keys]
        self._anonymous_client = None if keys else ApiClient(None, num_processes)

    def find(self, headers: Mapping[str, str]) -> ApiClient:
        """Whose key is in `headers`, which are lower-case.

        All digests are compared, each in constant time: how long it takes tells nothing.

        Raises:
            Unauthorized: there is none, or it is not known.

        """
        if self._anonymous_client is not None:
            return self._anonymous_client
        presented = presented_key(headers)
        if presented is None:
            raise Unauthorized(
                "this server needs an API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`, or KEY as the password of Basic "
                "authentication."
            )
        digest = key_digest(presented)
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
