"""The engine process: `python -m noria.engine.process JSON`, started by the supervisor; JSON is an `EngineTask`.

Its threads communicate by queues. The *transport* reads and writes frames and answers clients, the *compiler* compiles
new samplers, the *loop* (the main thread) drives the device, the *sender* waits for pixels and sends them, and the
*mounter* loads more models. The channel is open while the models are loading.
"""

import faulthandler
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time

import msgspec
import setproctitle

from noria.config import EngineConfig
from noria.engine.base_engine import BaseEngine
from noria.engine.batch_engine import BatchEngine
from noria.engine.engine import Engine
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.receiver import RequestReceiver
from noria.engine.resources.priority import add_niceness
from noria.engine.runtime import BatchRuntime, load_runtime
from noria.errors import SetupError
from noria.observe.logs.setup import fields, logging_here
from noria.observe.metrics import declarations
from noria.observe.traces.setup import open_tracer
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import ExitCause
from noria.protocol.process_signals import die_with_parent
from noria.protocol.transport import EngineChannel

_log = logging.getLogger("noria.engine")


class EngineTask(msgspec.Struct, frozen=True):
    """The configuration of an engine process; the supervisor passes it on the command line."""

    config: EngineConfig
    models: tuple[AnyModelSpec, ...]  # the default model first
    device: str
    address: str
    name: str
    crash_journal: str  # path of the file that lists the requests in flight; it survives the process
    log_level: str = "info"
    traces_endpoint: str = ""
    parent_pid: int | None = None  # the engine is killed when this process ends
    previous_exit: ExitCause = "none"  # how the previous process of this engine ended
    fd: int | None = None  # a listening TCP socket for `address`, inherited
    secret_key_file: str = ""  # of the channel; empty: it has none
    has_own_metrics: bool = False  # no front end exports the series that exist before the engine does
    niceness: int = 0  # added to the process's on a CPU, once the models are loaded


def main(task: EngineTask) -> int:
    """Load and warm up the models, announce it, and run until SIGTERM. Returns the exit status."""
    die_with_parent(signal.SIGKILL, task.parent_pid)
    setproctitle.setproctitle(f"noria engine {task.name}")
    threading.excepthook = _end_process
    if task.has_own_metrics:
        declarations.init_engine_series([task.name])
    declarations.ENGINE_STARTS.labels(task.name, task.previous_exit).inc()
    channel = EngineChannel(
        task.address,
        pathlib.Path(task.secret_key_file).read_text(encoding="ascii") if task.secret_key_file else "",
        None if task.fd is None else socket.socket(fileno=task.fd),
    )
    watchdog = HangWatchdog(task.config.hang_timeout_s, time.monotonic)
    crash_journal = CrashJournal(task.crash_journal)
    # Front ends decide which requests are sampled.
    tracer, close_tracer = open_tracer(task.traces_endpoint, 1.0, task.name)
    receiver = RequestReceiver(
        channel,
        task.models,
        task.device,
        watchdog=watchdog,
        crash_journal=crash_journal,
        previous_exit=task.previous_exit,
        tracer=tracer,
    )
    receiver.start()
    try:
        runtime = load_runtime(task.models, task.config, task.device)
    except SetupError as error:
        _log.error("%s", error.message)
        return error.exit_status
    if runtime.device == "cpu" and task.niceness:
        add_niceness(task.niceness)
    watchdog.expect_iteration(runtime.longest_iteration_s)
    engine: BaseEngine
    if isinstance(runtime, BatchRuntime):
        engine = BatchEngine(task.name, channel, receiver, runtime, tracer)
    else:
        engine = Engine(task.name, channel, receiver, runtime, tracer)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when an engine stops
    receiver.set_ready(runtime)
    _log.info(
        "%s ready: %s on %s, %s",
        task.name,
        ", ".join(spec.name for spec in task.models),
        runtime.device,
        ", ".join(f"{name} {value}" for name, value in runtime.resolved_settings.items()),
        extra=fields(
            event="models_ready",
            models=[spec.name for spec in task.models],
            device=runtime.device,
            **runtime.resolved_settings,
            previous_exit=task.previous_exit,
        ),
    )
    engine.run()
    runtime.save_costs()
    channel.close()
    close_tracer()
    return 0


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """End the process when a thread fails, because requests would stay unanswered; the supervisor restarts it."""
    name = fault.thread and fault.thread.name
    log_fields = fields(event="thread_failed", thread=name)
    _log.critical("the %s thread failed; the engine ends", name, exc_info=fault.exc_value, extra=log_fields)
    logging.shutdown()  # flush that line, even if the supervisor reads slowly
    os._exit(1)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[1], type=EngineTask)
    faulthandler.enable()  # print the stack when a native library crashes
    with logging_here(task.name, task.log_level):
        status = main(task)
    os._exit(status)  # skips the interpreter's shutdown, which takes two seconds with torch; nothing is left to save
