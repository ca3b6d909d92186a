"""Runs one engine process as a child of this process: starts it again when it ends, and kills it when it hangs.

`noria.supervisor` keeps it as an engine of one machine. The child's port and key stay the same, so that front ends find
its next process, which tells them how the last one ended.
"""

import asyncio
import contextlib
import pathlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from noria.config import Config
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import Leave
from noria.protocol.tasks import EngineTask
from noria.protocol.transport import EngineEndpoint, make_secret_key
from noria.supervisor.child_keeper import ENGINE_STOP_TIMEOUT_S, ChildKeeper, CommandBuilder, child_command
from noria.supervisor.child_process import engine_child
from noria.supervisor.exit_cause import describe_status
from noria.supervisor.private_folder import private_folder

_IDLE_POLL_S = 0.1


class EngineRunner:
    """An engine, over all its restarts. Its work is done by a thread with an event loop of its own.

    The thread lives as long as this object is not stopped, because the kernel kills the engine when the thread that
    started it ends.
    """

    def __init__(
        self,
        config: Config,
        models: Sequence[AnyModelSpec],
        models_now: Callable[[], Sequence[AnyModelSpec]],
        name: str,
        host: str,
        build_command: CommandBuilder = child_command,
    ) -> None:
        """Start the engine `name` with `models` on the first configured device, at a free port of the address `host`.

        `models_now` returns what it is to load when it starts again; nothing: what it loaded the last time. Raises
        ConfigError if nothing can be written to the temporary folder.
        """
        self._until_stopped = contextlib.ExitStack()
        family, shown_host = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
        folder = self._until_stopped.enter_context(private_folder())
        listener = self._until_stopped.enter_context(socket.create_server((host, 0), family=family))
        address, key = f"tcp://{shown_host}:{listener.getsockname()[1]}", make_secret_key()
        key_file = pathlib.Path(folder) / "key"
        key_file.touch(0o600)
        key_file.write_text(key, encoding="ascii")
        task = EngineTask(
            config.engine,
            tuple(models),
            config.engine.devices[0],
            address,
            name,
            crash_journal=f"{folder}/crash_journal",
            log_level=config.log_level,
            traces_endpoint=config.traces_endpoint,
            fd=listener.fileno(),
            secret_key_file=str(key_file),
            has_own_metrics=True,
        )
        self.endpoint = EngineEndpoint(name, address, key, models[0].name)
        self.metrics_folder = folder  # with the files of `observe.metrics`
        self.ready: Future[None] = Future()  # raises RuntimeError if the engine is given up before it was ready
        self.failure = ""  # why the engine was given up
        self.engine = engine_child(task, models_now)
        self._keeper = ChildKeeper(
            folder,
            None,
            build_command,
            in_own_groups=False,  # uvloop, the event loop of Ray Serve, has no process_group
        )
        self._loop = asyncio.new_event_loop()
        self._leaving = asyncio.Event()
        self._thread = threading.Thread(target=self._run_thread, name="engine runner", daemon=True)
        self._thread.start()

    async def drain(self, limit_s: float) -> None:
        """Take the engine out of service, and wait until it has nothing more to do, for at most `limit_s` seconds.

        Front ends move its requests to other engines; those that no other engine can take are finished.
        """
        self._set(self._leaving)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                # The runner's thread changes `load`.
                while (load := self.engine.load) and load.num_running + load.num_waiting > 0:  # noqa: ASYNC110
                    await asyncio.sleep(_IDLE_POLL_S)

    def stop(self) -> None:
        """End the engine, and wait for its end."""
        self._set(self._keeper.stopping)
        self._thread.join(2 * ENGINE_STOP_TIMEOUT_S)
        self._until_stopped.close()

    def _set(self, event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine has ended
            self._loop.call_soon_threadsafe(event.set)

    def _run_thread(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise

    async def _run(self) -> None:
        running = self._keeper.start(self.engine)
        monitoring = asyncio.create_task(self.engine.monitor(self._on_ready, follows_load=True))
        stopping, leaving = asyncio.create_task(self._keeper.stopping.wait()), asyncio.create_task(self._leave())
        until_stop: list[asyncio.Task[Any]] = [running, monitoring, stopping]
        done, _ = await asyncio.wait(until_stop, return_when=asyncio.FIRST_COMPLETED)
        self._keeper.stopping.set()  # also after an internal error, which is raised below
        await self._keeper.stop([self.engine], ENGINE_STOP_TIMEOUT_S)
        leaving.cancel()
        if (end := running.result()) is not None and self.engine.process is not None:
            status = describe_status(await self.engine.process.wait())
            self._fail(f"{self.engine.name} ended {status}: {end.reason}; its log has the reason.")
        for task in done:
            task.result()

    def _on_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(reason))

    async def _leave(self) -> None:
        await self._leaving.wait()
        self.engine.tell(Leave())
