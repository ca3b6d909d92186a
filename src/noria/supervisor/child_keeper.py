"""Keeps children running: starts them, starts them again when they end, and stops them.

The supervisor keeps all processes of a server with it, a replica on Ray its one engine. Each child decides what follows
its end (`child_process.py`); this module carries it out.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import multiprocess

from noria.observe.logs.log_record import fields
from noria.observe.logs.setup import child_log_environment
from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.protocol.process_signals import blocking_signals
from noria.supervisor.child_process import Child, ChildKind
from noria.supervisor.exit_cause import describe_status
from noria.supervisor.log_collector import LogCollector
from noria.supervisor.restart_policy import GiveUp, Restart

log = logging.getLogger("noria.supervisor")

CommandBuilder = Callable[[ChildKind, str], list[str]]
"""Returns the command line of a child, given its kind and its task as JSON; tests pass one that runs small scripts."""

# An engine is stopped after the front ends, so it has no requests left to finish.
ENGINE_STOP_TIMEOUT_S = 5.0


def child_command(kind: ChildKind, task_json: str) -> list[str]:
    """Return the command line that starts a child."""
    return [sys.executable, "-m", f"noria.{kind}.process", task_json]


class ChildKeeper:
    """Keeps children of this process running until `stopping` is set.

    Its thread must live as long as the children, because the kernel ends a child with the thread that started it.
    """

    def __init__(
        self,
        metrics_folder: str,
        logs: LogCollector | None,
        build_command: CommandBuilder,
        *,
        in_own_groups: bool = True,
    ) -> None:
        """`metrics_folder` gets the files of the children's metrics. Without `logs` they inherit stdout and stderr.

        `in_own_groups`: processes that a child starts get no Ctrl-C, because their parent stops the children in order.
        """
        self._group: dict[str, Any] = {"process_group": 0} if in_own_groups else {}
        self._metrics_folder, self._logs, self._build_command = metrics_folder, logs, build_command
        self.stopping = asyncio.Event()  # no child is started again
        self.killing = asyncio.Event()  # children that have not ended yet are killed
        self.tasks: dict[str, asyncio.Task[GiveUp | None]] = {}  # one for each child, by its name

    def start(self, child: Child) -> asyncio.Task[GiveUp | None]:
        """Start `child`, and again whenever it ends.

        The task ends when the child is given up, has retired, or has ended after `stopping`. It returns the reason for
        giving up.
        """
        task = self.tasks[child.name] = asyncio.create_task(self._run(child))
        return task

    async def stop(self, children: Sequence[Child], grace_s: float) -> None:
        """Tell `children` to end; send SIGKILL to those left after `grace_s` seconds, or once `killing` is set."""
        for child in children:
            child.order_end()
        tasks = [self.tasks[child.name] for child in children]
        ended: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
        killing: asyncio.Future[Any] = asyncio.create_task(self.killing.wait())
        await asyncio.wait([ended, killing], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        for child, task in zip(children, tasks, strict=True):
            if not task.done():
                child.log(logging.WARNING, "killed", "is killed: it has not ended in time")
                child.send_signal(signal.SIGKILL)
        await ended

    async def _run(self, child: Child) -> GiveUp | None:
        while not self.stopping.is_set():
            process = child.process = await self._start_process(child)
            child.started(time.monotonic())
            child.log(logging.DEBUG, "started", f"started, process {process.pid}", pid=process.pid)
            if self.stopping.is_set():
                child.order_end()
            status = await process.wait()
            decision, how = child.ended(status, time.monotonic()), f"ended {describe_status(status)}"
            multiprocess.mark_process_dead(process.pid, self._metrics_folder)  # type: ignore[no-untyped-call]
            if self.stopping.is_set():
                child.log(logging.DEBUG, "ended", how, status=status)
                break
            try:
                merge_dead_processes(self._metrics_folder)
            except OSError as error:
                message = "cannot merge the metrics of dead processes: %s"
                log.warning(message, error, extra=fields(event="dead_processes_not_merged"))
            match decision:
                case None:
                    child.log(logging.INFO, "ended", how, status=status)
                    break
                case Restart(delay_s):
                    message = f"{how}; starting it again in {delay_s:.1f} s"
                    child.log(logging.ERROR, "restarted", message, status=status, delay_s=delay_s)
                    try:
                        await asyncio.wait_for(self.stopping.wait(), delay_s)
                    except TimeoutError:
                        await asyncio.to_thread(child.prepare)
                case GiveUp(_, reason):
                    child.log(logging.ERROR, "given_up", f"{how}: {reason}; stopping", status=status)
                    return decision
        return None

    async def _start_process(self, child: Child) -> asyncio.subprocess.Process:
        task = msgspec.structs.replace(child.task, parent_pid=os.getpid())
        environment = child_environment(self._metrics_folder)
        with contextlib.ExitStack() as until_started:
            output = None
            if self._logs is not None:
                environment |= child_log_environment(self._logs.mark)
                output = until_started.enter_context(self._logs.open_pipe(child.name))
            until_started.enter_context(blocking_signals())
            return await asyncio.create_subprocess_exec(
                *self._build_command(child.kind, msgspec.json.encode(task).decode()),
                env=environment,
                stdout=output,
                stderr=output,
                pass_fds=child.pass_fds,
                **self._group,
            )


def child_environment(metrics_folder: str) -> dict[str, str]:
    """Return the children's environment; variables that the operator has set are kept."""
    defaults = {
        "HF_HUB_OFFLINE": "1",  # everything has been downloaded already
        "TRANSFORMERS_VERBOSITY": "error",
        # Memory in pages of 2 MB where the kernel allows that on request: a text takes 5 % less CPU time.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        # An idle OpenMP thread spins for about 10 µs, then sleeps and frees the core for a front end. Sleeping at once
        # (OMP_WAIT_POLICY=passive) halves the speed of a small model; spinning longer starves the front ends (ADR 5).
        defaults["GOMP_SPINCOUNT"] = "10000"
    return defaults | os.environ | {"PROMETHEUS_MULTIPROC_DIR": metrics_folder}
