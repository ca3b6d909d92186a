"""The choice of one of two versions for a request: a share of the keys, always the same ones, goes to the canary.

A key is whatever shall stay with one version: a user, a session, or the request's id if nothing shall. Its hash is a
fixed point between 0 and 1, and the canary has those below its weight. So while the weight grows, keys move from the
control to the canary and never back, and all processes agree without talking. Each deployment has its own salt, so that
not always the same keys come first.
"""

import hashlib
from typing import Literal

from msgspec import Struct

from noria.errors import InvalidField, short_repr

ArmName = Literal["control", "canary"]
_RANGE = 2**64
_MAX_SALT_BYTES = hashlib.blake2b.MAX_KEY_SIZE


class TrafficSplit(Struct, frozen=True):
    """The weight of a canary beside the control. Raises ValueError if a value is not allowed."""

    control: str  # the version that answers the rest
    canary: str
    weight: float  # the canary's share of the keys, 0 to 1
    salt: str  # the deployment's id

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"{self.weight!r}; a weight is 0 to 1")
        if not 1 <= len(self.salt.encode()) <= _MAX_SALT_BYTES:
            raise ValueError(f"{short_repr(self.salt)}; a salt has 1 to {_MAX_SALT_BYTES} bytes")

    def choose(self, key: str, override: str | None = None) -> ArmName:
        """Return the arm for a key. `override` is a tester's choice: an arm or a version; whether it is allowed is
        checked before.

        Raises InvalidField: the override is neither.
        """
        if override is None:
            # 2⁶⁴ as an integer: a weight of 1 has all keys, since none is rounded up to it.
            return "canary" if key_position(self.salt, key) < round(self.weight * _RANGE) else "control"
        match override:
            case "control" | self.control:
                return "control"
            case "canary" | self.canary:
                return "canary"
        raise InvalidField(
            f"{short_repr(override)} is not served here; allowed are control ({self.control}) and canary "
            f"({self.canary})."
        )


def key_position(salt: str, key: str) -> int:
    """Return the key's place, 0 to 2⁶⁴ − 1: its BLAKE2b (RFC 7693) keyed by the salt."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=salt.encode())
    return int.from_bytes(digest.digest(), "big")
