"""`noria bench cluster`: what serving on Ray costs, and how both servers scale, with engines whose device sleeps.

For each number of engines both servers run at once and get each load in turn, so that both meet the same disturbances.
Ctrl-C and SIGTERM keep what was measured.
"""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

import psutil

from noria.testing.server import RunningServer
from noria_bench.cluster import fake_device
from noria_bench.cluster.options import ClusterOptions
from noria_bench.cluster.report import write_report
from noria_bench.cluster.results import (
    FILE_NAME,
    SERVINGS,
    ClusterResult,
    ClusterRun,
    Serving,
    Steps,
    num_failed,
    summarize,
)
from noria_bench.cluster.servings import NUM_SLOTS, cpu_s_by_role, running_serving
from noria_bench.load.closed_loop import Reply, run_closed_loop
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import machine_cpu_s
from noria_bench.running import make_results_folder, run_to_end, status_log, write_json
from noria_bench.targets.environments import python_of, versions_of

_log_status = status_log("cluster")

# Width and height, as many pixels in both. The device's time for a step depends on the width.
_SIZES_PX: Mapping[Steps, tuple[int, int]] = {"short": (128, 160), "long": (160, 128)}
# Steps of successive images, which differ so that those of a batch end in different iterations.
_NUM_STEPS = (10, 8, 12, 9, 11)
_MEAN_STEPS = sum(_NUM_STEPS) / len(_NUM_STEPS)
# As many images wait as run, so that no slot is empty while an answer and the next request are under way.
_USERS_PER_ENGINE = 2 * NUM_SLOTS
_WARM_UP_S = 2.0
# Until users who begin at once are spread over the iterations: an image waits as long as it runs.
_RAMP_IMAGES = 3.0


def main(options: ClusterOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report and the plot into `folder`, print the report; returns the exit status.

    Raises:
        ConfigError: Ray's environment is not installed, or the folder cannot be created.

    """
    python_of("ray")  # fails here rather than after the first server
    make_results_folder(folder)
    with tempfile.TemporaryDirectory(prefix="noria-cluster-") as name:
        bench = ClusterBench(options, folder, pathlib.Path(name))
        status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), folder)[0].read_text(encoding="utf-8"))
    return status or int(num_failed(bench.runs) > 0)


@dataclass
class ClusterBench:
    """The state of the bench: what has been measured so far."""

    options: ClusterOptions
    folder: pathlib.Path
    work: pathlib.Path  # temporary
    runs: list[ClusterRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self._provenance = collect_provenance()
        self._step_ms: dict[Steps, float] = {"short": self.options.step_ms, "long": self.options.long_step_ms}

    def measure(self) -> None:
        """Measure everything; saves after each load."""
        for num_engines in sorted({*self.options.engines, *self.options.scaling}):
            self._measure_engines(num_engines)
        self.complete = True
        write_json(self.result(), self.folder / FILE_NAME)

    def result(self) -> ClusterResult:
        """The document so far."""
        return ClusterResult(
            provenance=self._provenance,
            versions=versions_of("ray"),
            options={**asdict(self.options), "slots": NUM_SLOTS, "users_per_engine": _USERS_PER_ENGINE},
            ideal={steps: NUM_SLOTS * 1000 / (_MEAN_STEPS * step_ms) for steps, step_ms in self._step_ms.items()},
            runs=self.runs,
            failures=self.failures,
            complete=self.complete,
        )

    def _measure_engines(self, num_engines: int) -> None:
        """All loads of both servers with so many engines."""
        _log_status(f"{num_engines} engines: starting both servers")
        step_ms = {_SIZES_PX[steps][0]: step_ms for steps, step_ms in self._step_ms.items()}
        variables = fake_device.install_at(self.work, step_ms)
        with contextlib.ExitStack() as stack:
            servers = {
                serving: stack.enter_context(
                    running_serving(serving, num_engines, variables, self.work / f"{serving}-{num_engines}")
                )
                for serving in SERVINGS
            }
            for serving, server in servers.items():
                replies = self._load(server, num_engines, "short", _WARM_UP_S)
                if failed := {reply.status for reply in replies} - {HTTPStatus.OK}:
                    raise RuntimeError(f"{serving}, {num_engines} engines: the warm-up got statuses {sorted(failed)}")
            num_rounds = self.options.num_rounds if num_engines in self.options.engines else 0
            loads: list[tuple[Steps, int]] = [("short", number) for number in range(num_rounds)]
            if num_engines in self.options.scaling:
                loads.append(("long", self.options.scaling.index(num_engines)))
            for steps, number in loads:
                for serving in SERVINGS if number % 2 == 0 else reversed(SERVINGS):
                    run = self._measure(serving, servers[serving], num_engines, steps, number)
                    self.runs.append(run)
                    write_json(self.result(), self.folder / FILE_NAME)
                    _log_status(
                        f"{num_engines} engines, {steps} steps, {serving}: {run.images_per_s:.2f} images/s, "
                        f"p99 {run.p99_ms:.0f} ms"
                    )

    def _measure(
        self, serving: Serving, server: RunningServer, num_engines: int, steps: Steps, number: int
    ) -> ClusterRun:
        ramp_s = _RAMP_IMAGES * _MEAN_STEPS * self._step_ms[steps] / 1000
        with ThreadPoolExecutor(1) as executor:
            users = executor.submit(self._load, server, num_engines, steps, ramp_s + self.options.seconds)
            time.sleep(ramp_s)
            before, began_s = _read_cpu_s(server), time.monotonic()
            time.sleep(self.options.seconds - 0.1)  # all users are still there
            after, ended_s = _read_cpu_s(server), time.monotonic()
        replies = users.result()
        cpu_s = {role: max(0.0, spent - before[role]) for role, spent in after.items()}
        return summarize(serving, num_engines, steps, number, replies, (began_s, ended_s), cpu_s)

    def _load(self, server: RunningServer, num_engines: int, steps: Steps, seconds: float) -> list[Reply]:
        width_px, height_px = _SIZES_PX[steps]

        def body(number: int) -> dict[str, Any]:
            return {
                "prompt": "a red circle above a blue square",
                "seed": number,
                "width": width_px,
                "height": height_px,
                "inference_steps": _NUM_STEPS[number % len(_NUM_STEPS)],
            }

        return run_closed_loop(server.port, num_engines * _USERS_PER_ENGINE, seconds, body)


def _read_cpu_s(server: RunningServer) -> dict[str, float]:
    """CPU seconds until now: of the server's processes by role, of this one, and of all others on the machine."""
    found, mine = cpu_s_by_role(server), psutil.Process().cpu_times()
    found["bench"] = mine.user + mine.system
    return {**found, "others": machine_cpu_s() - sum(found.values())}
