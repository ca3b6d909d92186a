"""`noria bench quick`: the overhead of the server over a bare loop on this machine. Takes under two minutes.

Two comparisons, in alternating rounds, so that a noisy machine affects both sides equally:
  - 8 users: images per second of the server, over those of the shortest in-process loop at batch 8;
  - 1 user: seconds for one image from the server, over those of diffusers' StableDiffusionPipeline.
It also measures the CPU time of the front end per request, the PNG included.
"""

import functools
import os
import pathlib
import statistics
from typing import Any

import msgspec

from noria.config import Config
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.server import RunningServer, config_flags, running_server
from noria_bench.load import closed_loop
from noria_bench.load.workload import caption
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.reports.provenance_text import result_line
from noria_bench.reports.table import Table, format_number
from noria_bench.running import status_log, write_json
from noria_bench.targets.server import quiet_config

_log_status = status_log("quick")
NUM_USERS = 8
NUM_ROUNDS = 3
# The time for which each round's eight users send requests.
_LOAD_S = 10.0
# The part of that time until the users are out of step.
_WARM_UP_S = 2.0
# The images that each round's single user requests.
_NUM_SINGLE_IMAGES = 6


def main(config: Config, output: pathlib.Path | None = None) -> int:
    """Measure `config.model` with its default size, steps, scheduler and guidance.

    Print a table and write JSON to `output`.
    """
    result = measure(config)
    if output is not None:
        write_json(result, output)
    print(table(result))
    return 0


def measure(config: Config) -> dict[str, Any]:
    """The results as one JSON-ready document."""
    # As the supervisor sets it for engines; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from noria_bench.targets.pipeline import load_pipeline, time_calls

    header = collect_provenance()
    spec = open_model_of(DiffusionModelSpec, config.model, config.engine)
    pipeline, settings = load_pipeline(spec, config.engine)
    steps, guidance = spec.default_steps, spec.default_guidance
    rounds: list[dict[str, Any]] = []
    with running_server([config.model, *config_flags(quiet_config(config))]) as server:
        for number in range(NUM_ROUNDS):
            _log_status(f"round {number + 1} of {NUM_ROUNDS}")
            captions = [caption(k) for k in range(NUM_USERS)]
            loop_s = time_calls(3, functools.partial(pipeline.generate_batch, captions, steps, guidance))
            replies, cpu_s = _run_users(server, NUM_USERS, _LOAD_S, 1000 * number)
            single_s = time_calls(_NUM_SINGLE_IMAGES, lambda: pipeline.generate(caption(1), steps, guidance))
            single_replies, _ = _run_users(
                server, 1, _NUM_SINGLE_IMAGES * statistics.median(single_s), 1000 * number + 500
            )
            rounds.append(
                {
                    "loop_images_per_s": NUM_USERS / statistics.median(loop_s),
                    "server_images_per_s": closed_loop.images_per_second(replies, _WARM_UP_S),
                    "pipeline_seconds": statistics.median(single_s),
                    "server_seconds": statistics.median(
                        reply.latency_s for reply in single_replies if reply.status == 200
                    ),
                    "frontend_cpu_ms": 1000 * cpu_s / len(replies),
                    "requests": len(replies) + len(single_replies),
                    "failures": sum(reply.status != 200 for reply in [*replies, *single_replies]),
                }
            )
        seconds_to_ready = server.seconds_to_ready
    return {
        **header,
        "bench": "quick",
        "model": {"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
        "workload": {"steps": steps, "guidance": guidance, "scheduler": spec.default_scheduler, "users": NUM_USERS},
        "settings": msgspec.to_builtins(settings),
        "seconds_to_ready": seconds_to_ready,
        "rounds": rounds,
        "summary": summarise(rounds),
    }


def summarise(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds; the ratios are medians of each round's own ratio."""
    summary = {
        key: statistics.median(r[key] for r in rounds) for key in rounds[0] if key not in ("requests", "failures")
    }
    throughput = [r["server_images_per_s"] / r["loop_images_per_s"] for r in rounds]
    latency = [r["server_seconds"] / r["pipeline_seconds"] for r in rounds]
    return summary | {
        "throughput_ratio": statistics.median(throughput),
        "latency_ratio": statistics.median(latency),
        "failures": sum(r["failures"] for r in rounds),
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table with a line of provenance."""
    summary, workload = result["summary"], result["workload"]
    rows = tuple(
        (label, *(format_number(summary[key], digits) for key in keys), format_number(summary[ratio], 3))
        for label, digits, keys, ratio in (
            ("8 users, images/s", 2, ("loop_images_per_s", "server_images_per_s"), "throughput_ratio"),
            ("1 user, seconds per image", 3, ("pipeline_seconds", "server_seconds"), "latency_ratio"),
        )
    )
    notes = (
        "Bare is, for 8 users, the shortest in-process loop at batch 8; for 1 user, diffusers' own pipeline. "
        f"Front end: {summary['frontend_cpu_ms']:.1f} ms of CPU per request, PNG included. "
        f"Ready {result['seconds_to_ready']:.1f} s after the start. Failures: {summary['failures']}.",
        f"{result['model']['name']}, {workload['steps']} guided steps; {result_line(result)}",
    )
    return Table("Overhead", ("", "bare", "Noria", "ratio"), rows, notes).markdown()


def _run_users(
    server: RunningServer, num_users: int, seconds: float, first_caption: int
) -> tuple[list[closed_loop.Reply], float]:
    """The replies to captions from number `first_caption` on, and the CPU seconds of the front ends meanwhile."""

    def cpu_s() -> float:
        return sum(sum(frontend.cpu_times()[:2]) for frontend in server.children("frontend"))

    before = cpu_s()
    replies = closed_loop.run_closed_loop(
        server.port, num_users, seconds, lambda k: {"prompt": caption(first_caption + k), "seed": k}
    )
    return replies, cpu_s() - before
