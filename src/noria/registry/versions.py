"""The versions of models: what is known of each, and which one a name means. Calls block."""

import shlex

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.errors import RegistryError, did_you_mean, short_list, short_repr
from noria.registry.changes import Change
from noria.registry.schema import aliases, artifacts, locations, models, version_events, versions
from noria.registry.tags import parse_tags, read_tags
from noria.storage.field_copies import copy_fields


class Version(Struct, frozen=True):
    """A version of a model."""

    id: int
    model: str
    number: int
    digest: str  # digest of its manifest
    kind: str
    fingerprint: str
    source: str
    size_bytes: int
    num_files: int
    aliases: tuple[str, ...]
    urls: tuple[str, ...]
    added: Change  # the last time
    removed: Change | None  # None: it is there
    tags: tuple[str, ...] = ()  # KEY=VALUE
    revision: str | None = None  # revision of its source: a commit of the hub, NAME/NUMBER of MLflow

    @property
    def name(self) -> str:
        """`MODEL@NUMBER`."""
        return f"{self.model}@{self.number}"


def model_id_of(connection: Connection, name: str) -> int:
    """Return the id of a model. Raises RegistryError: there is none of this name."""
    found: int | None = connection.scalar(sa.select(models.c.id).where(models.c.name == name))
    if found is None:
        known = sorted(connection.scalars(sa.select(models.c.name)))
        listed = f"Known are {short_list(known, 20)}." if known else "There is none yet: noria models add NAME SOURCE."
        raise RegistryError(f"there is no model {short_repr(name)}.{did_you_mean(name, known)} {listed}")
    return found


def unknown_alias(connection: Connection, model: str, alias: str) -> RegistryError:
    """Return the error that names the aliases of a model."""
    query = sa.select(aliases.c.alias).join(models).where(models.c.name == model)
    known = sorted(connection.scalars(query))
    listed = f"Its aliases are {short_list(known)}." if known else "It has none."
    return RegistryError(f"the model {model} has no alias {short_repr(alias)}.{did_you_mean(alias, known)} {listed}")


def find_version(connection: Connection, spec: str) -> Version:
    """Return the version that `MODEL`, `MODEL@NUMBER`, `MODEL@ALIAS` or `MODEL@KEY=VALUE` names.

    Of a model alone, and of those with all tags of `KEY=VALUE,…`, that is the latest.

    Raises RegistryError: there is none.
    """
    model, _, wanted = spec.partition("@")
    model_id_of(connection, model)
    found = read_versions(connection, models.c.name == model)
    present = [version for version in found if version.removed is None]
    if not wanted:
        if not present:
            raise RegistryError(f"all versions of {model} are removed. Add one: noria models add {model} SOURCE.")
        return present[-1]
    if "=" in wanted:
        return _find_tagged(model, wanted, present)
    if not wanted.isdecimal():
        for version in present:
            if wanted in version.aliases:
                return version
        raise unknown_alias(connection, model, wanted)
    for version in found:
        if version.number == int(wanted):
            if version.removed is not None:
                raise RegistryError(
                    f"{version.name} was removed by {version.removed.by}. Add it again: noria models add {model} "
                    f"{shlex.quote(version.source)}."
                )
            return version
    numbers = ", ".join(str(version.number) for version in present[-20:]) or "none"
    latest = "latest " if len(present) > 20 else ""
    raise RegistryError(f"the model {model} has no version {wanted}. Its {latest}versions are {numbers}.")


def _find_tagged(model: str, wanted: str, present: list[Version]) -> Version:
    """Return the latest version with all tags that are wanted. Raises RegistryError: there is none."""
    tags = parse_tags(wanted)
    for version in reversed(present):
        if tags <= set(version.tags):
            return version
    known = sorted({tag for version in present for tag in version.tags})
    listed = f"Its versions have the tags {short_list(known, 20)}." if known else "Its versions have no tags."
    raise RegistryError(
        f"no version of {model} has the tag{'s' if len(tags) > 1 else ''} {wanted}.{did_you_mean(wanted, known)} "
        f"{listed} To give it: noria models tag {model}@NUMBER {wanted.replace(',', ' ')}."
    )


def read_version(connection: Connection, version_id: int) -> Version:
    """Return the version with this id."""
    (found,) = read_versions(connection, versions.c.id == version_id)
    return found


def read_versions(connection: Connection, condition: sa.ColumnElement[bool]) -> list[Version]:
    """Return the versions for which `condition` holds, by model and number."""
    query = (
        sa.select(versions, models.c.name, artifacts.c.size_bytes, artifacts.c.manifest)
        .join(models, versions.c.model_id == models.c.id)
        .join(artifacts, versions.c.manifest_digest == artifacts.c.digest)
        .where(condition)
        .order_by(models.c.name, versions.c.number)
    )
    rows = connection.execute(query).all()
    ids, digests = [row.id for row in rows], {row.manifest_digest for row in rows}
    changes: dict[int, dict[str, Change]] = {}
    last_types: dict[int, str] = {}
    of_versions = sa.select(version_events).where(version_events.c.version_id.in_(ids)).order_by(version_events.c.seq)
    for row in connection.execute(of_versions):
        changes.setdefault(row.version_id, {})[row.type] = Change(row.at, row.by, row.why)
        last_types[row.version_id] = row.type
    alias_rows = connection.execute(sa.select(aliases).where(aliases.c.version_id.in_(ids)).order_by(aliases.c.alias))
    names: dict[int, list[str]] = {}
    for alias in alias_rows:
        names.setdefault(alias.version_id, []).append(alias.alias)
    tags = read_tags(connection, ids)
    urls: dict[str, list[str]] = {}
    for location in connection.execute(sa.select(locations).where(locations.c.digest.in_(digests))):
        urls.setdefault(location.digest, []).append(location.url)
    return [
        copy_fields(
            Version,
            row,
            model=row.name,
            digest=row.manifest_digest,
            num_files=row.manifest.count("\n"),
            aliases=tuple(names.get(row.id, ())),
            urls=tuple(sorted(urls.get(row.manifest_digest, ()))),
            added=changes[row.id]["added"],
            removed=changes[row.id]["removed"] if last_types[row.id] == "removed" else None,
            tags=tags.get(row.id, ()),
        )
        for row in rows
    ]
