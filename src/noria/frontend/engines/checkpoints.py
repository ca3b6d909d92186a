"""The models of `engine.checkpoints`: known by name from the start, opened and loaded when requests name them.

A file is opened once, which converts it the first time it is served; then its properties are known, and requests for it
can be validated. Engines load it when a request waits for it, and unload it for another one (`engine/mounting.py`).
Requests for one model share its opening and its load. One that fails fails all of them; the next request tries again.
A load is cancelled when the last request that waits for it has left, so that it unloads nothing.
"""

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from noria.config import EngineConfig
from noria.errors import DeadlineExceeded, ModelError, ModelNotLoaded, NoriaError
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.request_context import RequestContext
from noria.models.catalog import open_model
from noria.models.checkpoint_folder import checkpoint_files
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelKey, ModelSpec

MAX_WAITING_UPLOADS, MAX_WAITING_UPLOADS_PER_CLIENT = 8, 2  # half of a front end's places for uploads, and a client's
_RETRY_AFTER_S = 30.0  # a conversion takes up to minutes

log = logging.getLogger("noria.frontend")


class Checkpoints:
    """Opens and loads the models of a folder for the requests of a front end."""

    def __init__(
        self,
        pool: EnginePool,
        config: EngineConfig | None = None,
        entries: Sequence[str] = (),
    ) -> None:
        """`entries` are the names of the files and folders in `config.checkpoints` that can be opened."""
        self._pool, self._config = pool, config or EngineConfig()
        self.files = checkpoint_files(self._config.checkpoints, entries)
        self._specs: dict[str, DiffusionModelSpec] = {}
        self._opening: dict[str, asyncio.Task[str]] = {}  # each returns why it failed, or an empty string
        self._loading: dict[str, asyncio.Task[str]] = {}
        self._num_waiting: collections.Counter[str] = collections.Counter()  # for a load, by model
        self._uploads = ConcurrencyLimiter(
            "uploads for models that are being opened",
            MAX_WAITING_UPLOADS,
            MAX_WAITING_UPLOADS_PER_CLIENT,
            _RETRY_AFTER_S,
        )
        self._one_at_a_time = asyncio.Lock()
        if self.files:
            pool.on_models.append(self._learn)
            pool.submitter.can_load, pool.submitter.load = self._can_load, self._load

    def find_name(self, title: str) -> str | None:
        """Return the name of the checkpoint that A1111's clients call `title`: `FILE [HASH]`, the file, or the name."""
        called = [(name, (name, file.name, file.stem)) for name, file in self.files.items()]
        wanted = (title, title.rpartition(" [")[0])
        return next((name for each in wanted for name, titles in called if each in titles), None)

    @property
    def unopened(self) -> list[str]:
        """The names of the models whose properties are not known yet."""
        return [name for name in self.files if name not in self._specs]

    async def open(
        self, name: str | None, context: RequestContext, timeout_s: float, deadline_ms: float | None = None
    ) -> None:
        """Have the properties of the model `name` be known, if it is a checkpoint.

        Its file may have to be converted. The seconds that it took are added to `context.opened_s`.

        Raises:
            ModelNotLoaded: it cannot be opened.
            RateLimited: too many uploads wait for an opening: others would have no place.
            DeadlineExceeded: it took longer than `timeout_s` or `deadline_ms`. It goes on, for the next request.
        """
        if name is None or name not in self.files or name in self._specs:
            return
        started = time.monotonic()
        limit_s = timeout_s if deadline_ms is None else min(timeout_s, deadline_ms / 1000)
        held = self._uploads.hold(context.client) if context.holds_upload else contextlib.nullcontext()
        try:
            with held:
                async with asyncio.timeout(limit_s):
                    await self._share(self._opening, name, lambda: self._open(name))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{name} was not opened within {limit_s:g} s; it is still being converted."
            ) from error
        context.opened_s += time.monotonic() - started

    async def _open(self, name: str) -> str:
        file = self.files[name]
        try:
            async with self._one_at_a_time:  # as conversions are
                spec = await _in_daemon_thread(lambda: open_model(str(file), self._config))
            if not isinstance(spec, DiffusionModelSpec):
                raise ModelError(f"{file} is no image model.")
        except NoriaError as error:
            extra = fields(event="checkpoint_not_opened", model=name)
            log.error("%s cannot be opened: %s", name, error.message, extra=extra)
            return f"{name} cannot be opened: {error.message.replace(f'{file.absolute().parent}/', '')}"
        self._pool.add_on_demand(msgspec.structs.replace(spec, name=name))
        return ""

    def _learn(self, specs: Iterable[ModelSpec]) -> None:
        """Keep what is known of checkpoints: this front end has opened them, or another one has."""
        for spec in specs:
            if spec.name in self.files and isinstance(spec, DiffusionModelSpec):
                self._specs[spec.name] = spec
                self._pool.add_on_demand(spec)

    def loadable(self) -> set[ModelKey]:
        """Return the models that were opened and that a ready engine holds or can load."""
        return {spec.key for spec in self._specs.values() if self._pool.can_mount(spec)}

    def _can_load(self, model: str, version: str) -> bool:
        spec = self._specs.get(model)
        return spec is not None and spec.matches(model, version) and self._pool.can_mount(spec)

    async def _load(self, model: str, _version: str) -> None:
        self._num_waiting[model] += 1
        try:
            await self._share(self._loading, model, lambda: self._mount(self._specs[model]))
        finally:
            self._num_waiting[model] -= 1
            if not self._num_waiting[model] and (loading := self._loading.pop(model, None)) is not None:
                loading.cancel()

    async def _mount(self, spec: DiffusionModelSpec) -> str:
        error = await self._pool.mount(spec, self._config.max_checkpoints_loaded)
        return error and f"{spec.name} cannot be loaded: {error.replace(f'{spec.path.parent}/', '')}"

    async def _share(
        self, tasks: dict[str, asyncio.Task[str]], name: str, work: Callable[[], Coroutine[Any, Any, str]]
    ) -> None:
        """Wait for the work on a model that goes on, or is begun; it is not cancelled with the caller."""
        if name not in tasks:
            tasks[name] = task = asyncio.create_task(work())
            task.add_done_callback(lambda _: tasks.pop(name) if tasks.get(name) is task else None)
        if error := await asyncio.shield(tasks[name]):
            raise ModelNotLoaded(error)


def _in_daemon_thread(call: Callable[[], ModelSpec]) -> Awaitable[ModelSpec]:
    """Return what `call` does in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ModelSpec] = loop.create_future()

    def tell(result: ModelSpec | BaseException) -> None:
        if done.cancelled():
            return
        if isinstance(result, BaseException):
            done.set_exception(result)
        else:
            done.set_result(result)

    def run() -> None:
        result: ModelSpec | BaseException
        try:
            result = call()
        except BaseException as error:
            result = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="open checkpoint", daemon=True).start()
    return done
