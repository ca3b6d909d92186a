"""The thread that changes an engine's models while it serves: one `Mount` or `Unmount` after the other.

A model is loaded, warmed up and tested beside those that serve, on this thread and on ones that it starts. Where memory
does not hold both, a mount may replace models: they are released first, and loaded again if it fails. Checkpoints make
room for each other: idle ones are released first, and loaded again when they are asked for. The loop's thread makes a
model serve, or releases it, between two iterations: nothing else may change what its plans use. The thread has no timer
of the watchdog, so that a long load is no hang.

If a load ends the process, the next one has the models of the configuration, and clients hear no result; what was
mounted must be mounted again. The crash journal lists no request meanwhile, so none is blamed
(`CrashJournal.paused`). This module knows no kind of model.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future

from noria.engine.commands import ChangeModelCommand
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import AnyRuntime, LoadedModel
from noria.errors import NoriaError, SetupError
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import Mount, MountResult, Unmount
from noria.protocol.model_spec import ModelKey
from noria.protocol.transport import ClientId

_log = logging.getLogger("noria.engine")

_MIN_STAY_S = 1.0
"""How long a checkpoint stays at least, so that those that have waited for it have sent their requests."""


class ModelMounter(threading.Thread):
    """Makes the changes of `receiver.changes` in order, and answers each with `MountResult`.

    A change whose client has left is made all the same, unless it was cancelled before.
    """

    def __init__(
        self,
        receiver: RequestReceiver,
        runtime: AnyRuntime,
        on_result: Callable[[ClientId, MountResult], None],
        is_in_use: Callable[[ModelKey], bool],
    ) -> None:
        """`on_result` sends a result, after those of the requests that ended before. `is_in_use` is called by this
        thread, with a model; it returns whether a request of it has not ended.
        """
        super().__init__(name="mounter", daemon=True)
        self._receiver, self._runtime, self._on_result, self._is_in_use = receiver, runtime, on_result, is_in_use
        self._loaded_at: dict[ModelKey, float] = {}  # when each checkpoint was loaded, in monotonic seconds
        self._kind = receiver.models[0].kind
        self._stopped = threading.Event()
        self._pending: Future[None] = Future()  # what the loop's thread is to do

    def run(self) -> None:
        """Make changes until `stop`."""
        while (change := self._receiver.changes.get()) is not None and not self._stopped.is_set():
            client, message = change
            error, change_id = "", (client, message.change_id)
            try:
                if change_id not in self._receiver.wanted_changes:
                    raise SetupError("the mount was cancelled.")
                match message:
                    case Mount(model=spec, replaces=replaces, max_loaded=max_loaded):
                        self._mount(spec, replaces, max_loaded)
                    case Unmount(name=name, version=version):
                        self._unmount(ModelKey(name, version))
            except SetupError as failure:
                error = failure.message
            except CancelledError:
                return
            self._receiver.wanted_changes.discard(change_id)
            self._on_result(client, MountResult(message.change_id, error))

    def stop(self) -> None:
        """Make no further change. A load that has begun goes on, and its model is not used."""
        self._stopped.set()
        self._receiver.changes.put(None)
        self._pending.cancel()

    def _mount(self, spec: AnyModelSpec, replaces: Collection[ModelKey], max_loaded: int | None) -> None:
        """Load a model unless it is held; raises SetupError, after which the models are as before."""
        held = self._receiver.models
        if any(each.key == spec.key for each in held):
            return
        if spec.kind != self._kind:
            raise SetupError(
                f"{spec.name} is a model of kind {spec.kind}, and this engine holds models of kind {self._kind}; "
                f"mount it in an engine of its kind."
            )
        replaced = [each for each in held if each.key in replaces]
        if max_loaded is not None:
            self._make_room(max_loaded - 1)
            self._receiver.checkpoints_used[spec.key] = time.monotonic()
            self._add(spec)
            self._loaded_at[spec.key] = time.monotonic()
        elif replaced:
            self._swap(spec, replaced)
        else:
            self._add(spec)

    def _make_room(self, num_kept: int) -> None:
        """Release checkpoints but for so many, when their requests have ended.

        Idle ones are released first, and of these the least recently used.
        """
        used = self._receiver.checkpoints_used
        held = [spec.key for spec in self._receiver.models if spec.key in used]
        held.sort(key=lambda key: (self._is_in_use(key), used[key]))
        for key in held[: max(len(held) - num_kept, 0)]:
            if self._stopped.wait(max(self._loaded_at[key] + _MIN_STAY_S - time.monotonic(), 0.0)):
                raise CancelledError
            self._unmount(key)

    def _swap(self, spec: AnyModelSpec, replaced: Sequence[AnyModelSpec]) -> None:
        """Load a model instead of others. If these cannot be loaded again, the thread ends, and with it the engine."""
        self._receiver.set_models([each for each in self._receiver.models if each not in replaced], replaced)
        for each in replaced:
            self._release(each.key)
        try:
            self._add(spec)
        except SetupError as error:
            try:
                for each in replaced:
                    self._add(each)
            except SetupError as failure:
                raise RuntimeError(f"neither {spec.name} nor what it was to replace can be loaded") from failure
            raise SetupError(f"{error.message.rstrip('.')}. The version before serves again.") from None

    def _add(self, spec: AnyModelSpec) -> None:
        began = time.monotonic()
        try:
            loaded = self._load(spec)
        except SetupError as error:
            extra = fields(event="mount_failed", model=spec.name, version=spec.fingerprint)
            _log.warning("%s was not mounted: %s", spec.name, error.message, extra=extra)
            gc.collect()  # exceptions, and the frames that hold what was loaded, refer to each other
            self._runtime.free_memory()
            raise

        def add() -> None:
            self._receiver.watchdog.expect_iteration(loaded.longest_iteration_s)
            loaded.add()

        self._on_loop(spec.key, add)
        self._receiver.set_models((*self._receiver.models, spec))
        seconds = time.monotonic() - began
        extra = fields(event="model_mounted", model=spec.name, version=spec.fingerprint, seconds=round(seconds, 3))
        _log.info("%s was mounted in %.1f s", spec.name, seconds, extra=extra)

    def _load(self, spec: AnyModelSpec) -> LoadedModel:
        """Load a model; whatever fails is a SetupError with one line, without the failed load's frames and tensors."""
        try:
            with self._receiver.crash_journal.paused():
                return self._runtime.load_beside(spec)
        except NoriaError as error:
            message = error.message
        except BaseException as error:  # many types; a panic in Rust (tokenizers) raises no Exception
            extra = fields(event="mount_crashed", model=spec.name, version=spec.fingerprint)
            _log.exception("%s cannot be loaded", spec.name, extra=extra)
            message = f"{spec.name} in {spec.folder} cannot be loaded: {str(error) or type(error).__name__}"
        raise SetupError(message.splitlines()[0])

    def _unmount(self, model: ModelKey) -> None:
        """Release a model if it is held; raises SetupError if it is the only one."""
        held = self._receiver.models
        kept = [spec for spec in held if spec.key != model]
        if len(kept) == len(held):
            return
        if not kept:
            raise SetupError(
                f"{model.name} in version {model.version} is the only model of this engine; mount another one first."
            )
        self._receiver.set_models(kept)
        self._release(model)

    def _release(self, model: ModelKey) -> None:
        """Release a model that serves no new requests, when its last ones have ended."""
        self._receiver.wait_until_prepared(model)
        self._on_loop(model, lambda: self._runtime.release(model))
        self._runtime.free_memory()
        extra = fields(event="model_unmounted", model=model.name, version=model.version)
        _log.info("%s was unmounted", model.name, extra=extra)

    def _on_loop(self, model: ModelKey, change: Callable[[], None]) -> None:
        """Have the loop's thread call `change` when no request of `model` is left; raises CancelledError at the end."""
        self._pending = Future()
        self._receiver.commands.put(ChangeModelCommand(model, change, self._pending))
        if self._stopped.is_set():  # `stop` may not have seen this one
            self._pending.cancel()
        self._pending.result()
