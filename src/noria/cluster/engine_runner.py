"""Runs one engine process as a child of this process: starts it again when it ends, and kills it when it hangs.

The same decisions as the supervisor's (`noria.supervisor`), for one engine. The child's port and key stay the same, so
that front ends find its next process, which tells them how the last one ended.
"""

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec
import zmq
from prometheus_client import multiprocess

from noria.config import EngineConfig
from noria.observe.cgroup import memory_events, num_oom_kills
from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import EngineLoad, EngineState, Hello, Leave, LoadAck, Ping, Pong
from noria.protocol.transport import Connected, EngineConnection, EngineEndpoint, make_secret_key
from noria.supervisor.child_process import EngineChild
from noria.supervisor.child_tasks import describe_status
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.private_folder import private_folder
from noria.supervisor.restart_policy import GiveUp, RestartPolicy

_PING_INTERVAL_S = 2.0
_STOP_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.1


class EngineRunner:
    """One engine, over all its restarts. Its work is done by a thread with an event loop of its own.

    The thread lives as long as this object is not stopped, because the kernel kills the engine when the thread that
    started it ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[AnyModelSpec],
        models_now: Callable[[], Sequence[AnyModelSpec]],
        device: str,
        name: str,
        host: str,
        *,
        log_level: str = "info",
        traces_endpoint: str = "",
    ) -> None:
        """Start the engine `name` with `models`, at a free port of the address `host`.

        `models_now` returns what it is to load when it starts again; nothing: what it loaded the last time.
        """
        self._listener = socket.create_server((host, 0), family=_family(host))
        port = self._listener.getsockname()[1]
        shown_host = f"[{host}]" if ":" in host else host
        self.endpoint = EngineEndpoint(name, f"tcp://{shown_host}:{port}", make_secret_key(), models[0].name)
        self.load: EngineLoad | None = None  # as the engine last reported it
        self.ready: Future[None] = Future()  # raises RuntimeError if the engine is given up before it was ready
        self.failure = ""  # why the engine was given up
        self.metrics_folder = ""  # with the files of `observe.metrics`, once it is ready
        self._pid: int | None = None
        self._config, self._models, self._models_now, self._device = config, models, models_now, device
        self._log_level, self._traces_endpoint = log_level, traces_endpoint
        self._loop = asyncio.new_event_loop()
        self._leaving, self._stopping = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run_thread, name="engine runner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id of the engine; None: it does not run."""
        return self._pid

    @property
    def is_idle(self) -> bool:
        """Whether the engine runs and has nothing to do, as it last reported."""
        return self.load is None or self.load.num_running == self.load.num_waiting == 0

    async def drain(self, limit_s: float) -> None:
        """Take the engine out of service, and wait until it has nothing more to do, for at most `limit_s` seconds.

        Front ends move its requests to other engines; those that no other engine can take are finished.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._leaving.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self.is_idle:  # noqa: ASYNC110 - another thread changes it
                    await asyncio.sleep(_IDLE_POLL_S)

    def stop(self) -> None:
        """End the engine, and wait for its end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(2 * _STOP_TIMEOUT_S)
        self._listener.close()

    def _run_thread(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with private_folder() as folder:
                self.metrics_folder = f"{folder}/metrics"
                pathlib.Path(self.metrics_folder).mkdir()
                self._loop.run_until_complete(self._run(self._child(folder)))
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._loop.close()

    def _child(self, folder: str) -> EngineChild:
        key_file = pathlib.Path(folder) / "key"
        key_file.touch(0o600)
        key_file.write_text(self.endpoint.secret_key, encoding="ascii")
        task: dict[str, object] = {
            "config": self._config,
            "models": self._models,
            "device": self._device,
            "address": self.endpoint.address,
            "fd": self._listener.fileno(),
            "secret_key_file": str(key_file),
            "name": self.endpoint.name,
            "crash_journal": f"{folder}/crash_journal",
            "parent_pid": os.getpid(),
            "log_level": self._log_level,
            "traces_endpoint": self._traces_endpoint,
            "has_own_metrics": True,
        }
        events = memory_events()
        return EngineChild(
            kind="engine",
            name=self.endpoint.name,
            task=task,
            restart_policy=RestartPolicy(),
            address=self.endpoint.address,
            hang_detector=HangDetector(self._config.hang_timeout_s, self._config.start_timeout_s),
            num_oom_kills=lambda: num_oom_kills(events),
            models_now=self._models_now,
            pass_fds=(self._listener.fileno(),),
        )

    async def _run(self, child: EngineChild) -> None:
        connection = EngineConnection(self.endpoint.address, self.endpoint.secret_key)
        tasks = [
            asyncio.create_task(self._keep_running(child)),
            asyncio.create_task(self._follow(child, connection)),
            asyncio.create_task(self._ping(child, connection)),
            asyncio.create_task(self._stopping.wait()),
        ]
        leave = asyncio.create_task(self._leave(connection))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the error of a bug
        finally:
            for task in (leave, *tasks):
                task.cancel()
            await asyncio.gather(leave, *tasks, return_exceptions=True)
            connection.close()
            await _stop_child(child)

    async def _keep_running(self, child: EngineChild) -> None:
        """Start the engine, and again when it ends, until it is given up."""
        is_restart = False
        while True:
            if is_restart:
                await asyncio.to_thread(child.prepare)
            is_restart = True
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "noria.engine.process",
                msgspec.json.encode(child.task).decode(),
                env=_environment(self.metrics_folder),
                pass_fds=child.pass_fds,
            )
            child.started(time.monotonic())
            self._pid = child.process.pid
            status = await child.process.wait()
            decision = child.ended(status, time.monotonic())
            self.load = self._pid = None
            _keep_counts(child.process.pid, self.metrics_folder)
            if isinstance(decision, GiveUp) or decision is None:
                reason = "" if decision is None else decision.reason
                self._fail(f"{child.name} ended {describe_status(status)}: {reason}; its log has the reason.")
                return
            child.log(logging.ERROR, "restarted", f"ended {describe_status(status)}; starting it again", status=status)
            await asyncio.sleep(decision.delay_s)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(reason))

    async def _follow(self, child: EngineChild, connection: EngineConnection) -> None:
        async for event in connection.events():
            with contextlib.suppress(zmq.Again):  # disconnected: another `Connected` follows
                match event:
                    case Connected():
                        await connection.send(Hello("runner"))
                    case (EngineState() as state, _):
                        if child.update_state(state) and not self.ready.done():
                            self.ready.set_result(None)
                    case (EngineLoad() as load, _):
                        self.load = load
                        await connection.send(LoadAck())
                    case (Pong(incarnation, busy_s, limit_s), _) if incarnation == child.incarnation:
                        child.hang_detector.answered(busy_s, limit_s)

    async def _leave(self, connection: EngineConnection) -> None:
        await self._leaving.wait()
        with contextlib.suppress(zmq.Again):  # not running
            await connection.send(Leave())

    async def _ping(self, child: EngineChild, connection: EngineConnection) -> None:
        while True:
            await asyncio.sleep(min(_PING_INTERVAL_S, self._config.hang_timeout_s / 5))
            now = time.monotonic()
            child.kill_if_hung(now)
            child.hang_detector.pinged(now)
            with contextlib.suppress(zmq.Again):  # not running; the ping counts as unanswered
                await connection.send(Ping())


async def _stop_child(child: EngineChild) -> None:
    """Send the engine SIGTERM, and SIGKILL if it has not ended in time."""
    if child.process is None:
        return
    child.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await child.process.wait()
    except TimeoutError:
        child.send_signal(signal.SIGKILL)
        await child.process.wait()


def _keep_counts(pid: int, metrics_folder: str) -> None:
    """Keep what an ended engine has counted, and drop its gauges."""
    multiprocess.mark_process_dead(pid, metrics_folder)  # type: ignore[no-untyped-call]
    with contextlib.suppress(OSError):  # the disk is full: its file stays
        merge_dead_processes(metrics_folder)


def _environment(metrics_folder: str) -> dict[str, str]:
    """The engine's environment, as the supervisor's children have it."""
    defaults = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "GOMP_SPINCOUNT": "10000"}
    return defaults | os.environ | {"PROMETHEUS_MULTIPROC_DIR": metrics_folder}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
