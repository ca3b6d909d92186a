"""The rights of each API key: its scopes, images and texts per minute and in flight, and its highest priority.

Pure: `now` is an argument. A front end enforces its share of each limit and does not coordinate with the other front
ends.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import get_args

from noria.errors import InvalidField, MissingScope, RateLimited, short_repr
from noria.frontend.access.api_keys import ALL_SCOPES, ApiKey, KeyScope, format_scopes
from noria.protocol.request import Priority

# Sums of floats are inexact: a client that waits exactly as long as Retry-After says must pass.
_TOLERANCE_S = 1e-6
_PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # from the lowest


class TokenBucket:
    """Limits images or texts per minute. Holds one minute's worth of tokens and starts full.

    The state is one number, the time at which the bucket will be full (generic cell rate algorithm, ITU-T I.371).
    """

    def __init__(self, per_minute: float) -> None:
        self._full_at = 0.0
        self.update(per_minute)

    def update(self, per_minute: float) -> None:
        """Change the limit; the bucket stays as full as it is, in proportion."""
        self.capacity = per_minute  # that can pass at once
        self._emission_interval_s = 60.0 / per_minute

    def take(self, count: int, now: float) -> float:
        """Take `count` ≤ `capacity` tokens and return 0; or take none and return the seconds until there are enough."""
        full_at = max(self._full_at, now) + count * self._emission_interval_s
        wait_s = full_at - now - 60.0
        if wait_s > _TOLERANCE_S:
            return wait_s
        self._full_at = full_at
        return 0.0

    def refund(self, count: int) -> None:
        """Undo a successful `take`."""
        self._full_at -= count * self._emission_interval_s


class Quota:
    """How many results of one kind a key may have in flight and per minute; None: any number."""

    def __init__(self, key_name: str | None, unit: str, max_in_flight: int | None, per_minute: float | None) -> None:
        """`unit` names the results, in the plural."""
        self._unit, self.num_in_flight = unit, 0
        self._token_bucket: TokenBucket | None = None
        self.update(key_name, max_in_flight, per_minute)

    def update(self, key_name: str | None, max_in_flight: int | None, per_minute: float | None) -> None:
        """Change the limits; what is in flight and charged stays so."""
        self._key_name, self._max_in_flight = key_name, max_in_flight
        self.has_limits = max_in_flight is not None or per_minute is not None
        if per_minute is None:
            self._token_bucket = None
        elif self._token_bucket is None:
            self._token_bucket = TokenBucket(per_minute)
        else:
            self._token_bucket.update(per_minute)

    def check_rate(self, count: int) -> None:
        """Raise InvalidField if `count` is more than the key has per minute."""
        if self._token_bucket is not None:
            self._check_size(count, int(self._token_bucket.capacity), "a minute")

    @contextlib.contextmanager
    def hold(self, count: int, now: float, backlog_s: Callable[[], float], *, in_flight: bool) -> Iterator[None]:
        """Count as `acquire` (`in_flight`) or `charge` does, for the work before the request; undo it at the end.

        Others of the key that come meanwhile find the limits used. Raises what `acquire` or `charge` raises.
        """
        if in_flight:
            self.acquire(count, now, backlog_s)
        else:
            self.charge(count, now)
        try:
            yield
        finally:
            if in_flight:
                self.release(count)
            self.refund(count)

    def acquire(self, count: int, now: float, backlog_s: Callable[[], float]) -> None:
        """Count results as in flight until `release`, and charge them to the rate.

        What `backlog_s` returns becomes Retry-After.

        Raises:
            InvalidField: more than may ever be in flight.
            RateLimited: more than the limits allow now; nothing is counted then.
        """
        if self._max_in_flight is not None:
            self._check_size(count, self._max_in_flight, "in flight")
            if self.num_in_flight + count > self._max_in_flight:
                raise RateLimited(
                    f"the key {self._key_name!r} has {self.num_in_flight} {self._unit} in flight; {count} more would "
                    f"exceed its limit of {self._max_in_flight}. Try again when some are done.",
                    retry_after_s=backlog_s(),
                )
        self.charge(count, now)
        self.num_in_flight += count

    def release(self, count: int) -> None:
        """Undo `acquire` when the request has ended, whatever its outcome. The rate stays charged."""
        self.num_in_flight -= count

    def charge(self, count: int, now: float) -> None:
        """Charge results to the rate only. Raises RateLimited."""
        if self._token_bucket is None:
            return
        if wait_s := self._token_bucket.take(count, now):
            raise RateLimited(
                f"the key {self._key_name!r} allows {self._token_bucket.capacity:g} {self._unit} a minute; {count} "
                f"more are allowed in {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )

    def refund(self, count: int) -> None:
        """Undo `charge` for a request that was not accepted after all."""
        if self._token_bucket is not None:
            self._token_bucket.refund(count)

    def _check_size(self, count: int, limit: int, limit_name: str) -> None:
        if count > limit:
            field, got = (
                ("n", f"n is {count}") if self._unit == "images" else ("input", f"the request has {count} {self._unit}")
            )
            raise InvalidField(
                f"{got}; the key {self._key_name!r} has {limit} {self._unit} {limit_name}: allowed are 1 to {limit}.",
                field=field,
            )


class InFlight:
    """Counts results as in flight while it is entered, and charges them to the rate, which stays.

    Entering raises what `check_rate` and `acquire` of the quota raise. A class: a generator takes 2 µs more.
    """

    def __init__(self, quota: Quota, count: int, now: float, backlog_s: Callable[[], float]) -> None:
        self._quota, self._count, self._now, self._backlog_s = quota, count, now, backlog_s

    def __enter__(self) -> None:
        if self._quota.has_limits:
            self._quota.check_rate(self._count)
            self._quota.acquire(self._count, self._now, self._backlog_s)
        else:
            self._quota.num_in_flight += self._count

    def __exit__(self, *_: object) -> None:
        self._quota.num_in_flight -= self._count


class ApiClient:
    """The holder of one API key, and the state of its limits. `key` None: all clients of a server without keys."""

    def __init__(self, key: ApiKey | None, num_processes: int) -> None:
        self.name: str | None = None
        self.weight = 1.0  # weight of its share of an engine
        self._scopes: frozenset[KeyScope] = ALL_SCOPES
        self._max_priority: Priority = "high"
        self.images, self.texts = Quota(None, "images", None, None), Quota(None, "texts", None, None)
        if key is not None:
            self.update(key, num_processes)

    def update(self, key: ApiKey, num_processes: int) -> None:
        """Adopt the changed table of the key; what is in flight and charged stays so."""
        self.name, self._scopes, self._max_priority = key.name, key.scopes, key.priority
        self.weight = key.weight
        self.images.update(
            key.name,
            _share_in_flight(key.max_images_in_flight, num_processes),
            _share_per_minute(key.images_per_minute, num_processes),
        )
        self.texts.update(
            key.name,
            _share_in_flight(key.max_texts_in_flight, num_processes),
            _share_per_minute(key.texts_per_minute, num_processes),
        )

    def has_scope(self, scope: KeyScope) -> bool:
        """Return whether the client may do what `scope` allows."""
        return not self._scopes.isdisjoint((scope, "admin"))

    def require_scope(self, *allowed: KeyScope) -> None:
        """Raise MissingScope if the client has none of the `allowed` scopes."""
        if self._scopes.isdisjoint((*allowed, "admin")):
            raise MissingScope(
                f"this needs the scope {' or '.join(allowed)}; "
                f"the key {self.name!r} has {format_scopes(self._scopes)}. "
                "The server's operator can add it to the key's scopes."
            )

    def allowed_priority(self, priority: Priority | None) -> Priority | None:
        """Return `priority`, or the key's highest if it is None and the default is above that. Raises InvalidField."""
        if priority is None:
            return self._max_priority if self._max_priority == "low" else None
        allowed = _PRIORITIES[: _PRIORITIES.index(self._max_priority) + 1]
        if priority not in allowed:
            raise InvalidField(
                f"priority is {short_repr(priority)}; allowed for the key {self.name!r} are {', '.join(allowed)}.",
                field="priority",
            )
        return priority


def _share_in_flight(limit: int | None, num_processes: int) -> int | None:
    return None if limit is None else max(1, limit // num_processes)


def _share_per_minute(limit: int | None, num_processes: int) -> float | None:
    return None if limit is None else max(1.0, limit / num_processes)
