"""What each API key may do: its scopes, images per minute, images in flight, and its highest priority.

Pure: `now` is an argument. A front end enforces its share of each limit and does not coordinate with the other front ends.
"""

from typing import get_args

import msgspec

from noria.errors import InvalidField, MissingScope, RateLimited, short_repr
from noria.frontend.access.api_keys import ALL_SCOPES, ApiKey, KeyScope, format_scopes
from noria.protocol.request import ImageRequestBody, Priority

# Sums of floats are inexact: a client that waits exactly as long as Retry-After says must pass.
_TOLERANCE_S = 1e-6
_PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # from the lowest


class TokenBucket:
    """Limits images per minute. Holds one minute's worth of tokens and starts full.

    The state is one number, the time at which the bucket will be full (generic cell rate algorithm, ITU-T I.371).
    """

    def __init__(self, images_per_minute: float) -> None:
        self.capacity = images_per_minute  # that can pass at once
        self._emission_interval_s = 60.0 / images_per_minute
        self._full_at = 0.0

    def take(self, num_images: int, now: float) -> float:
        """Take `num_images` ≤ `capacity` tokens and return 0; or take none and return the seconds until they are available."""
        full_at = max(self._full_at, now) + num_images * self._emission_interval_s
        wait_s = full_at - now - 60.0
        if wait_s > _TOLERANCE_S:
            return wait_s
        self._full_at = full_at
        return 0.0

    def refund(self, num_images: int) -> None:
        """Undo a successful `take`."""
        self._full_at -= num_images * self._emission_interval_s


class ApiClient:
    """The holder of one API key and the state of its limits. With `key` None: all clients of a server without keys, unlimited."""

    def __init__(self, key: ApiKey | None, num_processes: int) -> None:
        self.name = None if key is None else key.name
        self._scopes = ALL_SCOPES if key is None else key.scopes
        self._max_priority: Priority = "high" if key is None else key.priority
        self._max_in_flight: int | None = None
        self._token_bucket: TokenBucket | None = None
        self._num_in_flight = 0
        if key is not None and key.max_images_in_flight is not None:
            self._max_in_flight = max(1, key.max_images_in_flight // num_processes)
        if key is not None and key.images_per_minute is not None:
            self._token_bucket = TokenBucket(max(1.0, key.images_per_minute / num_processes))

    def has_scope(self, scope: KeyScope) -> bool:
        """Return whether the client may do what `scope` allows."""
        return scope in self._scopes or "admin" in self._scopes

    def require_scope(self, scope: KeyScope) -> None:
        """Raise MissingScope if the client may not do what `scope` allows."""
        if not self.has_scope(scope):
            raise MissingScope(
                f"this needs the scope {scope}; the key {self.name!r} has {format_scopes(self._scopes)}. The server's "
                "operator can add it to the key's scopes."
            )

    def apply_priority(self, body: ImageRequestBody) -> ImageRequestBody:
        """Return `body`, with the key's highest priority if it names none and the default is above that.

        Raises:
            InvalidField: the priority is above the key's, or `n` is more images than the key has per minute.

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
        """Count images as in flight until `release`, and charge them to the rate. `backlog_s` becomes Retry-After.

        Raises:
            InvalidField: more images than may ever be in flight.
            RateLimited: more images than the limits allow now; nothing is counted then.

        """
        if self._max_in_flight is not None:
            self._check_size(num_images, self._max_in_flight, "in flight")
            if self._num_in_flight + num_images > self._max_in_flight:
                raise RateLimited(
                    f"the key {self.name!r} has {self._num_in_flight} images in flight; {num_images} more would exceed "
                    f"its limit of {self._max_in_flight}. Try again when some are done.",
                    retry_after_s=backlog_s,
                )
        self.charge(num_images, now)
        self._num_in_flight += num_images

    def release(self, num_images: int) -> None:
        """Undo `acquire` when the request has ended, whatever its outcome. The rate stays charged."""
        self._num_in_flight -= num_images

    def charge(self, num_images: int, now: float) -> None:
        """Charge images to the rate only. Raises RateLimited."""
        if self._token_bucket is None:
            return
        if wait_s := self._token_bucket.take(num_images, now):
            raise RateLimited(
                f"the key {self.name!r} allows {self._token_bucket.capacity:g} images a minute; {num_images} more are "
                f"allowed in {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )

    def refund(self, num_images: int) -> None:
        """Undo `charge` for a request that was not accepted after all."""
        if self._token_bucket is not None:
            self._token_bucket.refund(num_images)

    def _check_size(self, num_images: int, max_images: int, limit_name: str) -> None:
        if num_images > max_images:
            raise InvalidField(
                f"n is {num_images}; the key {self.name!r} has {max_images} images {limit_name}: allowed are 1 to {max_images}.",
                field="n",
            )
