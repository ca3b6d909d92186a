"""The tags of versions, KEY=VALUE: what the last event of each key says. Calls block."""

import re
from collections.abc import Collection

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from noria.errors import RegistryError, short_list, short_repr
from noria.registry.changes import Change
from noria.registry.schema import tag_events

_TAG = re.compile(r"[A-Za-z0-9_.+-]{1,64}=[A-Za-z0-9_.+:/-]{1,128}")


def parse_tags(text: str) -> set[str]:
    """Return the tags of `KEY=VALUE,KEY=VALUE`. Raises RegistryError: one is not allowed."""
    tags = text.split(",")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise RegistryError(
                f"the tag {short_repr(tag)} is not allowed; allowed is KEY=VALUE: 1 to 64 of A-Z a-z 0-9 _ . + - as "
                "key, and 1 to 128 of these and : / as value."
            )
    return set(tags)


def read_tags(connection: Connection, version_ids: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Return the tags of versions, KEY=VALUE, by version id; a version that never had one is left out."""
    query = sa.select(tag_events).where(tag_events.c.version_id.in_(version_ids)).order_by(tag_events.c.seq)
    found: dict[int, dict[str, str | None]] = {}
    for row in connection.execute(query):
        found.setdefault(row.version_id, {})[row.key] = row.value
    return {
        version_id: tuple(f"{key}={value}" for key, value in sorted(tags.items()) if value is not None)
        for version_id, tags in found.items()
    }


def set_tag(connection: Connection, version_id: int, tag: str, change: Change) -> None:
    """Give a version a tag, instead of one with the same key; nothing is written if it has it."""
    if tag not in read_tags(connection, [version_id]).get(version_id, ()):
        key, _, value = tag.partition("=")
        _write_event(connection, version_id, key, value, change)


def delete_tag(connection: Connection, version_id: int, name: str, tag: str, change: Change) -> None:
    """Take a tag from the version `name`. Raises RegistryError: it does not have it."""
    tags = read_tags(connection, [version_id]).get(version_id, ())
    if tag not in tags:
        listed = f"Its tags are {short_list(tags)}." if tags else "It has none."
        raise RegistryError(f"{name} has no tag {short_repr(tag)}. {listed}")
    _write_event(connection, version_id, tag.partition("=")[0], None, change)


def _write_event(connection: Connection, version_id: int, key: str, value: str | None, change: Change) -> None:
    values = {"version_id": version_id, "key": key, "value": value, **msgspec.structs.asdict(change)}
    connection.execute(tag_events.insert().values(values))
