"""The engine process: `python -m noria.engine.process JSON`, started by the supervisor; JSON is an `EngineTask`.

The *transport* reads frames and answers clients, the *compiler* compiles new samplers, the *loop* (the main thread)
drives the device, the *sender* waits for pixels and sends them, and the *mounter* loads more models; they communicate
by queues. The loop of texts is driven by the transport and by the threads of its sessions (`engines.py`). The
channel is open while the models are loading.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time

import msgspec
import setproctitle

from noria.engine.engines import BaseEngine, BatchEngine, StepEngine
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.receiver import RequestReceiver
from noria.engine.resources.priority import add_niceness
from noria.engine.runtime import BatchRuntime, load_runtime
from noria.errors import SetupError
from noria.observe.logs.log_record import fields
from noria.observe.logs.setup import logging_here
from noria.observe.metrics import declarations
from noria.observe.metrics.engine_series import init_engine_series
from noria.observe.traces.setup import open_tracer
from noria.protocol.process_signals import STOP_SIGNAL, die_with_parent, leave_signals_to_supervisor
from noria.protocol.tasks import EngineTask
from noria.protocol.transport import EngineChannel

_log = logging.getLogger("noria.engine")


def main(task: EngineTask) -> int:
    """Load and warm up the models, announce it, and run until told to end. Returns the exit status."""
    leave_signals_to_supervisor()
    die_with_parent(signal.SIGKILL, task.parent_pid)
    setproctitle.setproctitle(f"noria engine {task.name}")
    threading.excepthook = _end_process
    if task.has_own_metrics:
        init_engine_series([task.name])
    declarations.ENGINE_STARTS.labels(task.name, task.previous_exit).inc()
    listener = None if task.fd is None else socket.socket(fileno=task.fd)
    channel = EngineChannel(task.address, task.secret_key, listener)
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
    started_s, names = time.monotonic(), [spec.name for spec in task.models]
    _log.info(
        "loading %s: the libraries are imported first, which takes up to a minute if the disk is slow",
        ", ".join(names),
        extra=fields(event="models_loading", models=names),
    )
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
        engine = StepEngine(task.name, channel, receiver, runtime, tracer)
    signal.signal(STOP_SIGNAL, lambda *_: engine.stop())
    receiver.set_ready(runtime)
    _log.info(
        "%s ready after %.1f s: %s on %s, %s",
        task.name,
        seconds := time.monotonic() - started_s,
        ", ".join(names),
        runtime.device,
        ", ".join(f"{name} {value}" for name, value in runtime.resolved_settings.items()),
        extra=fields(
            event="models_ready",
            models=names,
            seconds=round(seconds, 3),
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
