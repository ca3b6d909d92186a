"""Models, their versions and aliases.

A version is the content of a folder: the same content is the same version of a model, however often it is added.
Versions and what happened to them and to aliases are never deleted; a removed version can be added again.

Calls block. Any number of processes may call at once. `now` is Unix time in seconds; `by` names who asks.
"""

import getpass
import os
import re
import uuid
from collections.abc import Collection, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection, Engine

from noria.errors import RegistryError, short_repr
from noria.registry.changes import Change
from noria.registry.deployments.states import IN_USE
from noria.registry.lineage.openlineage import DatasetRef, Event, EventType, parse_event
from noria.registry.lineage.run_events import MODELS_NAMESPACE, RunId, model_ref, run_event
from noria.registry.lineage.run_rows import STRUCK_OUT
from noria.registry.lineage.store import record_events
from noria.registry.model_folder import ModelFolder
from noria.registry.schema import (
    alias_events,
    aliases,
    artifacts,
    deployment_heads,
    deployments,
    endpoints,
    locations,
    models,
    runs,
    version_events,
    versions,
)
from noria.registry.tags import delete_tag, set_tag
from noria.registry.versions import Version, find_version, model_id_of, read_version, read_versions, unknown_alias
from noria.storage.database import insert_if_new, write_transaction

_NAME = re.compile(r"[A-Za-z0-9_.+/-]{1,128}")
_ALIAS = re.compile(r"(?!\d+\Z)[A-Za-z0-9_.+-]{1,64}")  # not a number: that is a version
_ADD_JOB = "models.add"


def user_name() -> str:
    """Return the name of the user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        return f"uid {os.getuid()}"


class AliasChange(Struct, frozen=True):
    """An event of an alias."""

    alias: str
    number: int | None  # number of the version that it names from then on; None: the alias is deleted
    change: Change


class ModelStore:
    """The models of a database opened by `schema.open_registry`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(
        self,
        name: str,
        folder: ModelFolder,
        change: Change,
        *,
        alias: str | None = None,
        run_id: str | None = None,
        inputs: Mapping[DatasetRef, str | None] | None = None,
    ) -> tuple[Version, bool]:
        """Add a version, or find the one with the same content; returns it, and whether it was there before.

        `run_id` is the run that made it, `inputs` are data that it was made from. All is one transaction.

        Raises:
            ForeignRun, InvalidField, RegistryError: the folder's lineage is rejected, as `LineageStore.record` says.
            RegistryError: a name is not allowed, or there is no such run.
        """
        check_model_name(name)
        with write_transaction(self._engine) as connection:
            model_id = _lock_model(connection, name)
            version_id, was_there = _insert_version(connection, model_id, folder, change)
            if alias is not None:
                _set_alias(connection, model_id, alias, version_id, change)
            record_events(connection, folder.events, change.by, change.at)
            own = _lineage(connection, name, folder, change, run_id, inputs or {})
            record_events(connection, own, change.by, change.at, is_operator=True)
            version = read_version(connection, version_id)
        return version, was_there

    def check_addition(self, name: str, alias: str | None, run_id: str | None) -> None:
        """Raise RegistryError if `add` would reject these, whatever the folder: to be called before it is read."""
        check_model_name(name)
        if alias is not None:
            _check_alias(alias)
        if run_id is not None:
            with self._engine.connect() as connection:
                _find_run(connection, run_id)

    def all_versions(
        self, model: str | None = None, *, with_removed: bool = False, tags: Collection[str] = ()
    ) -> list[Version]:
        """The versions of all models or of one that have all `tags`, by model and number.

        Raises RegistryError: there is no such model.
        """
        with self._engine.connect() as connection:
            if model is not None:
                model_id_of(connection, model)
            found = read_versions(connection, sa.true() if model is None else models.c.name == model)
        return [
            version for version in found if (with_removed or version.removed is None) and set(tags) <= set(version.tags)
        ]

    def get(self, spec: str) -> Version:
        """The version that a text names: see `versions.find_version`. Raises RegistryError: there is none."""
        with self._engine.connect() as connection:
            return find_version(connection, spec)

    def manifest(self, version: Version) -> str:
        """The manifest of a version."""
        with self._engine.connect() as connection:
            query = sa.select(artifacts.c.manifest).where(artifacts.c.digest == version.digest)
            manifest: str = connection.execute(query).scalar_one()
            return manifest

    def alias_history(self, model: str) -> list[AliasChange]:
        """All events of a model's aliases, the oldest first. Raises RegistryError: there is no such model."""
        with self._engine.connect() as connection:
            query = (
                sa.select(alias_events, versions.c.number)
                .outerjoin(versions, alias_events.c.version_id == versions.c.id)
                .where(alias_events.c.model_id == model_id_of(connection, model))
                .order_by(alias_events.c.seq)
            )
            return [
                AliasChange(row.alias, row.number, Change(row.at, row.by, row.why)) for row in connection.execute(query)
            ]

    def set_alias(self, spec: str, alias: str, change: Change) -> Version:
        """Let `alias` name the version of `spec`; returns the version. Raises RegistryError."""
        with write_transaction(self._engine) as connection:
            model_id = lock_known_model(connection, spec.partition("@")[0])
            version = find_version(connection, spec)
            _set_alias(connection, model_id, alias, version.id, change)
            return read_version(connection, version.id)

    def delete_alias(self, model: str, alias: str, change: Change) -> None:
        """Let `alias` name nothing. Raises RegistryError: the model has no such alias."""
        with write_transaction(self._engine) as connection:
            model_id = lock_known_model(connection, model)
            is_alias = sa.and_(aliases.c.model_id == model_id, aliases.c.alias == alias)
            if not connection.execute(aliases.delete().where(is_alias)).rowcount:
                raise unknown_alias(connection, model, alias)
            _write_alias_event(connection, model_id, alias, None, change)

    def tag(self, spec: str, tags: Collection[str], change: Change, *, delete: bool = False) -> Version:
        """Give the version of `spec` tags, each instead of one with the same key, or delete them; returns the version.

        Raises RegistryError: there is no such version, or it does not have a tag that is to be deleted.
        """
        with write_transaction(self._engine) as connection:
            lock_known_model(connection, spec.partition("@")[0])
            version = find_version(connection, spec)
            for tag in sorted(tags):
                if delete:
                    delete_tag(connection, version.id, version.name, tag, change)
                else:
                    set_tag(connection, version.id, tag, change)
            return read_version(connection, version.id)

    def remove(self, spec: str, change: Change) -> Version:
        """Remove a version from the lists; its history stays. Returns it.

        Raises RegistryError: there is none, or an alias or a deployment uses it.
        """
        with write_transaction(self._engine) as connection:
            lock_known_model(connection, spec.partition("@")[0])
            version = find_version(connection, spec)
            if version.aliases:
                raise RegistryError(
                    f"{version.name} is named by the alias {version.aliases[0]}. Move it first, noria models alias "
                    f"{version.model}@NUMBER {version.aliases[0]}, or delete it with --delete."
                )
            used_by = connection.scalars(
                sa.select(endpoints.c.name)
                .join(deployments, deployments.c.endpoint_id == endpoints.c.id)
                .join(deployment_heads, deployment_heads.c.deployment_id == deployments.c.id)
                .where(deployments.c.version_id == version.id, deployment_heads.c.state.in_(IN_USE))
            ).first()
            if used_by is not None:
                raise RegistryError(
                    f"{version.name} is deployed to the endpoint {used_by}. Deploy another version there first."
                )
            _write_version_event(connection, version.id, "removed", change)
            return read_version(connection, version.id)


def check_model_name(name: str, noun: str = "model name") -> None:
    """Raise RegistryError if the name of a model, or of an endpoint, is not allowed."""
    if not _NAME.fullmatch(name):
        raise RegistryError(f"the {noun} {short_repr(name)} is not allowed; 1 to 128 of A-Z a-z 0-9 _ . + / - are.")


def _lock_model(connection: Connection, name: str) -> int:
    """Return the id of a model, which is created if it is new; no other transaction changes the model until the end."""
    insert_if_new(connection, models, name=name)
    found: int = connection.execute(sa.select(models.c.id).where(models.c.name == name).with_for_update()).scalar_one()
    return found


def lock_known_model(connection: Connection, name: str) -> int:
    """Return the id of a model, which no other transaction changes. Raises RegistryError: there is no such model."""
    model_id_of(connection, name)
    return _lock_model(connection, name)


def _insert_version(connection: Connection, model_id: int, folder: ModelFolder, change: Change) -> tuple[int, bool]:
    """Return the id of the version with the folder's content, and whether it was there."""
    manifest, digest = folder.manifest, folder.manifest.digest
    insert_if_new(connection, artifacts, digest=digest, size_bytes=manifest.size_bytes, manifest=manifest.text)
    insert_if_new(connection, locations, digest=digest, url=folder.url)
    of_model = versions.c.model_id == model_id
    known = connection.scalar(sa.select(versions.c.id).where(of_model, versions.c.manifest_digest == digest))
    if known is not None:
        is_there = read_version(connection, known).removed is None
        if not is_there:
            _write_version_event(connection, known, "added", change)
        return known, is_there
    last = connection.scalar(sa.select(sa.func.max(versions.c.number)).where(of_model))
    values = {
        "model_id": model_id,
        "number": (last or 0) + 1,
        "manifest_digest": digest,
        "code_digest": "",
        "kind": folder.kind,
        "fingerprint": folder.fingerprint,
        "source": folder.source,
        "revision": folder.revision,
    }
    new: int = connection.execute(versions.insert().values(values).returning(versions.c.id)).scalar_one()
    _write_version_event(connection, new, "added", change)
    return new, False


def _lineage(
    connection: Connection,
    name: str,
    folder: ModelFolder,
    change: Change,
    run_id: str | None,
    inputs: Mapping[DatasetRef, str | None],
) -> Sequence[Event]:
    """Return the event that connects a version with its run and data, if one is named.

    Without a run, adding the version is the run; the same command again is the same one.
    """
    output = model_ref(name, folder.manifest.digest)
    if run_id is not None:
        run = _find_run(connection, run_id)
    elif inputs:
        named = f"{output}{sorted(inputs)}"
        run = RunId(str(uuid.uuid5(uuid.NAMESPACE_URL, named)), MODELS_NAMESPACE, _ADD_JOB)
    else:
        return []
    event_type: EventType = "OTHER" if run_id is not None else "COMPLETE"
    event = run_event(event_type, change.at, run, inputs=inputs, outputs={output: folder.url})
    return [parse_event(msgspec.json.encode(event))]


def _find_run(connection: Connection, run_id: str) -> RunId:
    run_id = run_id.strip().lower()  # as a parsed UUID is written
    row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).one_or_none()
    if row is None:
        raise RegistryError(
            f"there is no run {short_repr(run_id)}. Send its OpenLineage events first, or name no run: those whose "
            "outputs name the digest of this folder are found without it."
        )
    if row.status == STRUCK_OUT:
        raise RegistryError(f"the run {run_id} is struck out; name another one.")
    return RunId(run_id, row.job_namespace, row.job_name)


def _check_alias(alias: str) -> None:
    if not _ALIAS.fullmatch(alias):
        raise RegistryError(
            f"the alias {short_repr(alias)} is not allowed; 1 to 64 of A-Z a-z 0-9 _ . + - are, but not digits alone."
        )


def _set_alias(connection: Connection, model_id: int, alias: str, version_id: int, change: Change) -> None:
    _check_alias(alias)
    is_alias = sa.and_(aliases.c.model_id == model_id, aliases.c.alias == alias)
    if connection.scalar(sa.select(aliases.c.version_id).where(is_alias)) == version_id:
        return
    if not insert_if_new(connection, aliases, model_id=model_id, alias=alias, version_id=version_id):
        connection.execute(aliases.update().where(is_alias).values(version_id=version_id))
    _write_alias_event(connection, model_id, alias, version_id, change)


def _write_alias_event(
    connection: Connection, model_id: int, alias: str, version_id: int | None, change: Change
) -> None:
    values = {"model_id": model_id, "alias": alias, "version_id": version_id, **msgspec.structs.asdict(change)}
    connection.execute(alias_events.insert().values(values))


def _write_version_event(connection: Connection, version_id: int, event_type: str, change: Change) -> None:
    values = {"version_id": version_id, "type": event_type, **msgspec.structs.asdict(change)}
    connection.execute(version_events.insert().values(values))
