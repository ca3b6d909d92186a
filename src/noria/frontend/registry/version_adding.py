"""Adds versions of models to the registry. Their sources are read in other processes, which outlive a request."""

import asyncio
import os
from collections.abc import Mapping

from msgspec import Struct
from sqlalchemy import Engine

from noria.config import Config
from noria.errors import RateLimited, RegistryConflict, RegistryError, SetupError, SourceRejected
from noria.folders import data_folder
from noria.frontend.registry.connection import RegistryConnection
from noria.registry.changes import Change
from noria.registry.lineage.openlineage import DatasetRef
from noria.registry.lineage.run_events import parse_dataset
from noria.registry.model_store import ModelStore
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.reading_process import ReadingTask, read_in_process
from noria.registry.versions import Version

_MAX_READINGS = 2  # at once, of a front end; those that copy wait for each other
_MAX_READING_S = 6 * 3600.0
_RETRY_AFTER_S = 10.0


class WantedVersion(Struct, frozen=True):
    """The version that is to be added."""

    model: str
    source: str
    alias: str | None = None
    run_id: str | None = None
    datasets: tuple[str, ...] = ()


class VersionAdder:
    """Adds versions, until `aclose`."""

    def __init__(self, registry: RegistryConnection, config: Config) -> None:
        self._registry, self._folder = registry, data_folder(config, os.environ)
        self._limits = SourceLimits(config.registry.source_roots, config.registry.max_source_gib)
        self._running: dict[WantedVersion, asyncio.Task[tuple[Version, bool]]] = {}

    async def add(self, wanted: WantedVersion, change: Change) -> tuple[Version, bool]:
        """Add a version; returns it, and whether it was there. If the caller leaves, it is added all the same.

        A request for what is being added waits for that.

        Raises:
            RateLimited: too many are being added.
            RegistryConflict: a name is not allowed, the source holds a secret, or there is no such run.
            RegistryUnavailable: the database does not answer, or the source was not read in time.
            SourceRejected: the source cannot or may not be read, or is no model.
        """
        task = self._running.get(wanted)
        if task is None:
            if len(self._running) >= _MAX_READINGS:
                raise RateLimited(
                    f"{len(self._running)} versions are being added, which is the limit. Try again when one is there.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            task = self._running[wanted] = asyncio.create_task(self._add(wanted, change))
            task.add_done_callback(lambda ended: self._end(wanted, ended))
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """End what is being read. What is complete of a copy is kept."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, wanted: WantedVersion, ended: asyncio.Task[tuple[Version, bool]]) -> None:
        del self._running[wanted]
        if not ended.cancelled():
            ended.exception()  # its caller may have left

    async def _add(self, wanted: WantedVersion, change: Change) -> tuple[Version, bool]:
        try:
            await self._registry.run(
                lambda engine: ModelStore(engine).check_addition(wanted.model, wanted.alias, wanted.run_id)
            )
            inputs: Mapping[DatasetRef, str | None] = dict(map(parse_dataset, wanted.datasets))
            task = ReadingTask(wanted.source, wanted.model, str(self._folder), self._limits, os.getpid())
            folder = await read_in_process(task, _MAX_READING_S)
        except RegistryError as error:
            raise RegistryConflict(error.message) from error
        except SetupError as error:
            raise SourceRejected(error.message, field="source") from error

        def store(engine: Engine) -> tuple[Version, bool]:
            models = ModelStore(engine)
            return models.add(wanted.model, folder, change, alias=wanted.alias, run_id=wanted.run_id, inputs=inputs)

        return await self._registry.run(store)
