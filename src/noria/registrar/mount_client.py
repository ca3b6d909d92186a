"""An engine as the registrar sees it: which models it holds, and how a model is mounted and unmounted there."""

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Iterable

import zmq

from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import EngineState, Hello, Mount, MountResult, Unmount
from noria.protocol.model_spec import ModelKey
from noria.protocol.transport import Connected, Disconnected, EngineConnection

_CLIENT_NAME = "registrar"


class EngineGoneError(Exception):
    """The engine ended before it answered."""


class MountClient:
    """The connection to one engine."""

    def __init__(self, name: str, address: str, kind: str, secret_key: str = "", others: Collection[str] = ()) -> None:
        """`kind` is that of the engine's models. `others` are models of which it is to hold no version: other engines
        do, or front ends load them.
        """
        self.name, self.kind, self._others = name, kind, others
        self.models: tuple[AnyModelSpec, ...] = ()  # empty unless it is ready
        self.changed = asyncio.Event()  # set whenever `models` changes
        self.has_left = False  # it will not come back
        self._connection = EngineConnection(address, secret_key)
        self._results: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count()

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return bool(self.models)

    def holds(self, key: ModelKey) -> bool:
        """Whether it serves this version of the model."""
        return any(spec.key == key for spec in self.models)

    def can_hold(self, spec: AnyModelSpec) -> bool:
        """Whether this version is one that it may hold."""
        return spec.kind == self.kind and spec.name not in self._others

    def leave(self) -> None:
        """Let nothing wait for it any more. The caller ends `run`."""
        self.has_left = True
        self._lose()

    async def run(self) -> None:
        """Follow the engine, also over its restarts, until cancelled."""
        try:
            async for event in self._connection.events():
                match event:
                    case Connected():
                        with contextlib.suppress(zmq.Again):  # disconnected again: another `Connected` follows
                            self._connection.send(Hello(_CLIENT_NAME))
                    case Disconnected():
                        self._lose()
                    case (EngineState(state=state, models=models), _):
                        own = tuple(spec for spec in models if spec.name not in self._others)
                        self.models = own if state == "ready" else ()
                        self.changed.set()
                    case (MountResult(change_id, error), _) if change_id in self._results:
                        self._results.pop(change_id).set_result(error)
        finally:
            self._lose()
            self._connection.close()

    async def mount(self, spec: AnyModelSpec, replaces: Iterable[ModelKey] = ()) -> str:
        """Load a model, beside the others but for those that it `replaces`, which are unloaded first.

        Returns why that failed, empty if it did not. Raises EngineGoneError.
        """
        return await self._change(Mount(self._change_id(), spec, tuple(replaces)))

    async def unmount(self, key: ModelKey) -> str:
        """Release a model; return why that failed, empty if it did not. Raises EngineGoneError."""
        return await self._change(Unmount(self._change_id(), key.name, key.version))

    def _change_id(self) -> str:
        return f"{_CLIENT_NAME}-{next(self._numbers)}"

    async def _change(self, message: Mount | Unmount) -> str:
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._results[message.change_id] = result
        try:
            self._connection.send(message)
            return await result
        except zmq.Again as error:
            raise EngineGoneError(self.name) from error
        finally:
            self._results.pop(message.change_id, None)

    def _lose(self) -> None:
        self.models = ()
        self.changed.set()
        for result in self._results.values():
            if not result.done():
                result.set_exception(EngineGoneError(self.name))
        self._results.clear()
