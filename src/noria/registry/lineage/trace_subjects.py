"""Finds what is to be traced: by a text, as `noria trace` and the page /lineage take it, or by an image's metadata."""

import itertools
import re
import uuid

import sqlalchemy as sa
from sqlalchemy import Connection

from noria.errors import RegistryError, short_repr
from noria.images.metadata import GenerationMetadata
from noria.registry.lineage.nodes import NodeId
from noria.registry.lineage.run_events import dataset_ref, parse_dataset
from noria.registry.lineage.trace import (
    VERSIONS_OF_DATA,
    Direction,
    find_dataset,
    find_deployment,
    find_digest,
    find_endpoint,
    find_run,
    node_of,
)
from noria.registry.schema import dataset_versions, datasets, deployments, endpoints, runs, versions
from noria.registry.versions import find_version

MAX_CHARS = 2000
"""Of a text that names a subject: a URI and its version."""

MAX_NAMED = 20
"""Versions of data, or runs of a job, that one name means."""

_MAX_PARTS = 20  # parts of a namespace, between slashes


def find_subjects(connection: Connection, what: str, direction: Direction = "up") -> list[NodeId]:
    """Return what a text names.

    It is an endpoint, MODEL[@NUMBER|@ALIAS], `sha256:` and digits of a digest, URI@VERSION of data, the id of a run, or
    `KIND:KEY`, the id of a node. An endpoint comes before a model of the same name, but not on the way down.

    It may also be a name as traces print it: `KIND NAME`, or the name of data or a job, with its namespace or without.
    Of several versions or runs of that name, the latest `MAX_NAMED` are meant.

    Raises RegistryError: the registry does not have it.
    """
    try:
        return _find_exactly(connection, what, direction)
    except RegistryError:
        if found := _find_printed(connection, what):
            return found
        raise


def _find_printed(connection: Connection, what: str) -> list[NodeId]:
    """Return what a name as traces print it means; nothing if it is none. Raises RegistryError."""
    kind, _, name = what.partition(" ")
    if kind in ("endpoint", "deployment") and name:
        return [_find_node(connection, kind, name)]
    if kind == "model" and name:
        return _find_exactly(connection, name, "down")
    of_data, of_runs = (name if kind == each and name else what for each in ("dataset", "run"))
    if "://" in of_data and " " not in of_data:  # a URI
        dataset, _ = dataset_ref(of_data)
        of_data = f"{dataset.namespace} {dataset.name}"
    uri, _, version = of_data.rpartition("@")
    is_meant = sa.or_(
        _is_named(of_data, datasets.c.namespace, datasets.c.name),
        sa.and_(
            _is_named(uri, datasets.c.namespace, datasets.c.name),
            sa.or_(dataset_versions.c.version == version, dataset_versions.c.digest == version),
        ),
    )
    query = VERSIONS_OF_DATA.where(is_meant).order_by(dataset_versions.c.id.desc()).limit(MAX_NAMED)
    found = [node_of(row) for row in connection.execute(query)]
    if found:
        return list(dict.fromkeys(found))
    is_job = _is_named(of_runs, runs.c.job_namespace, runs.c.job_name)
    query = sa.select(runs.c.run_id).where(is_job).order_by(runs.c.started_at.desc()).limit(MAX_NAMED)
    return [NodeId("run", run_id) for run_id in connection.scalars(query)]


def _is_named(text: str, namespace: sa.Column[str], name: sa.Column[str]) -> sa.ColumnElement[bool]:
    """Whether a row has a name as traces print it: with its namespace or without."""
    # Names are compared first: putting them together for each row takes six times as long.
    ends = [match.end() for match in itertools.islice(re.finditer("[ /]", text), _MAX_PARTS)]
    return name.in_([text, *(text[end:] for end in ends)]) & sa.or_(
        name == text, namespace + " " + name == text, namespace + "/" + name == text
    )


def _find_exactly(connection: Connection, what: str, direction: Direction) -> list[NodeId]:
    kind, _, key = what.partition(":")
    if kind == "sha256":
        return find_digest(connection, what)
    if "://" in what:
        return [find_dataset(connection, *parse_dataset(what)[0])]
    if key:
        return [_find_node(connection, kind, key)]
    if _is_uuid(what):
        return [find_run(connection, what)]
    if direction == "up" and (endpoint := find_endpoint(connection, what)) is not None:
        return [endpoint]
    try:
        return [NodeId("model", find_version(connection, what).digest)]
    except RegistryError as error:
        raise _explained(connection, what, error) from None


def find_image_subjects(
    connection: Connection, metadata: GenerationMetadata, image: str, direction: Direction = "up"
) -> list[NodeId]:
    """Return what made an image: its deployment, if this registry has it, else the versions of its model.

    On the way down it is always the versions. `image` is its name in errors.

    Raises RegistryError: another program wrote it, or its model is not known here.
    """
    if metadata.noria is None or metadata.model_version is None:
        raise RegistryError(f"{image}: another program than Noria wrote it, so its model is not known here.")
    digest, number = metadata.model_digest, metadata.deployment
    if direction == "up" and number is not None:
        query = sa.select(deployments.c.id).join(versions).where(versions.c.manifest_digest == digest)
        if number in connection.scalars(query).all():
            return [NodeId("deployment", number)]
    # The content is what counts of another registry's deployment.
    found = sa.select(versions.c.manifest_digest).distinct().order_by(versions.c.manifest_digest)
    by_digest = found.where(versions.c.manifest_digest == digest)
    digests = list(connection.scalars(by_digest)) or list(
        connection.scalars(found.where(versions.c.fingerprint == metadata.model_version))
    )
    if not digests:
        raise RegistryError(
            f"{image}: its model {metadata.model} with the fingerprint {metadata.model_version} is not in the "
            "registry. Add the folder that made it: noria models add NAME SOURCE (for the model in the package: noria "
            "models add noria-shapes bundled)."
        )
    return [NodeId("model", each) for each in digests]


def _explained(connection: Connection, what: str, error: RegistryError) -> RegistryError:
    """Return the error that says what to do if a text is no model, but an endpoint that no deployment serves now."""
    query = sa.select(sa.func.max(deployments.c.id)).join(endpoints).where(endpoints.c.name == what)
    if (latest := connection.scalar(query)) is None:
        return error
    return RegistryError(
        f"no version of the registry serves the endpoint {what} now; the model of the server's configuration does. "
        f"Trace its latest deployment: deployment:{latest}."
    )


def _find_node(connection: Connection, kind: str, key: str) -> NodeId:
    match kind:
        case "endpoint":
            if connection.scalar(sa.select(endpoints.c.id).where(endpoints.c.name == key)) is not None:
                return NodeId("endpoint", key)
        case "deployment":
            if (number := _number(key)) is not None:
                return find_deployment(connection, number)
        case "model":
            return find_digest(connection, key)[0]
        case "dataset":
            number = _number(key)
            if connection.scalar(sa.select(dataset_versions.c.id).where(dataset_versions.c.id == number)) is not None:
                return NodeId("dataset", int(key))
        case "run":
            if _is_uuid(key):
                return find_run(connection, key)
    raise RegistryError(
        f"the registry has nothing with the id {short_repr(f'{kind}:{key}')}; allowed are endpoint:NAME, "
        "deployment:NUMBER, model:sha256:DIGEST, dataset:NUMBER and run:ID."
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
