"""Whose share of an engine a request takes: that of its API key; without keys, of whom it is for.

That is the value of `frontend.client_header`, if the operator names one, else the `user` of OpenAI's requests, else the
client's address, as `concurrency_limits.py` names it. Engines get digests of these, so that no log of theirs has them.
Each request of a client without keys can name another user: shares protect clients from each other's load, keys from
each other's cunning.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from noria.frontend.access.quotas import ApiClient


class Share(NamedTuple):
    """A client of engines, and the weight of its share."""

    client: str
    weight: float = 1.0
    is_named: bool = True  # by a key or by the operator's header


SHADOWS = Share(" shadows", 0.25)
"""The share of all copies of requests for shadows: in the background, as jobs are by default. No key has the name."""

_DIGEST_MARK = "~"


def share_of(headers: Mapping[str, str], client: str, api_client: ApiClient, client_header: str) -> Share:
    """Return the share of a request's client; `client` is as of `auth.client_id_of`."""
    if api_client.name is not None:
        return Share(api_client.name, api_client.weight)
    if client_header and (value := headers.get(client_header.lower())):
        return Share(_digest(f"header {value}"))
    return _share_of_address(client)


def share_of_user(user: str) -> Share:
    """Return the share of a user whom a request names."""
    return Share(_digest(f"user {user}"), is_named=False)


def job_client(key_name: str) -> str:
    """Return the client of the jobs of a key; empty: of all who have none."""
    return f"{key_name} jobs"


def is_share_of(client: str, key_name: str) -> bool:
    """Whether the share of `client` is that of a key, or of its jobs."""
    return client in (key_name, job_client(key_name))


def is_digest(client: str) -> bool:
    """Whether the name of a share says nothing but who has the same one."""
    return client.startswith(_DIGEST_MARK)


def _digest(name: str) -> str:
    """Return a name that no key has."""
    return _DIGEST_MARK + hashlib.blake2s(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@functools.lru_cache(256)
def _share_of_address(client: str) -> Share:
    return Share(_digest(client), is_named=False)
