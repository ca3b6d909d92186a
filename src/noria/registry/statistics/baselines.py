"""Reference distributions of versions: of one variable at one endpoint the last one holds. All are kept.

Calls block.
"""

import re
from collections.abc import Mapping

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from noria.errors import RegistryError
from noria.registry.changes import Change
from noria.registry.schema import baselines, models, versions
from noria.registry.versions import Version, find_version, read_versions
from noria.statistics.distributions import Counts
from noria.statistics.windows import Reference
from noria.storage.database import write_transaction

_FINGERPRINT = re.compile("[0-9a-f]{12}")


class BaselineStore:
    """The references of a database opened by `schema.open_registry`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def version_named(self, name: str) -> Version:
        """Return the version that is named as `find_version` does, or by the fingerprint of a configuration's model.

        Raises RegistryError: there is none.
        """
        with self._engine.connect() as connection:
            if not _FINGERPRINT.fullmatch(name):
                return find_version(connection, name)
            found = read_versions(connection, versions.c.fingerprint == name)
            present = [version for version in found if version.removed is None]
        if not present:
            raise RegistryError(
                f"the registry has no version with the fingerprint {name}, which is the configuration's model. Add it "
                "first, so that its reference has a place: noria models add NAME SOURCE."
            )
        return present[-1]

    def set(self, endpoint: str, version: Version, counts: Mapping[str, Counts | None], change: Change) -> None:
        """Let these be the references of a version's variables at an endpoint; None: it has none from now on."""
        rows = [
            {
                "version_id": version.id,
                "endpoint": endpoint,
                "variable": variable,
                "counts": None if each is None else msgspec.json.encode(each).decode(),
                **msgspec.structs.asdict(change),
            }
            for variable, each in counts.items()
        ]
        with write_transaction(self._engine) as connection:
            connection.execute(baselines.insert(), rows)

    def all(self) -> list[Reference]:
        """Return the references that hold."""
        with self._engine.connect() as connection:
            return _read(connection)


def _read(connection: Connection) -> list[Reference]:
    of = (baselines.c.version_id, baselines.c.endpoint, baselines.c.variable)
    newest = sa.select(sa.func.max(baselines.c.seq)).group_by(*of)
    query = (
        sa.select(baselines, models.c.name, versions.c.number, versions.c.fingerprint)
        .join(versions, baselines.c.version_id == versions.c.id)
        .join(models, versions.c.model_id == models.c.id)
        .where(baselines.c.seq.in_(newest), baselines.c.counts.is_not(None))
        .order_by(baselines.c.seq)
    )
    return [
        Reference(
            row.endpoint,
            f"{row.name}@{row.number}",
            row.fingerprint,
            row.variable,
            msgspec.json.decode(row.counts, type=Counts),
            row.at,
            row.by,
            row.why,
        )
        for row in connection.execute(query)
    ]
