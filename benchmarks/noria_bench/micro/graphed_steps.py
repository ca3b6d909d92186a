"""Measures what CUDA graphs save: UNet calls, and images of a few users, with and without them in turn, in one process.

python -m noria_bench.micro.graphed_steps [-o FILE]

The UNets have published sizes and random weights. Without a GPU there are no graphs, and the bench says so.
"""

import argparse
import json
import pathlib
import statistics
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto
from noria.models.diffusion.unet_models.graphed_calls import GraphedCalls, without_graphs
from noria_bench.device.architectures import SD15, SDXL, Architecture, build_denoiser, make_inputs
from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
from noria_bench.device.random_model import RANDOM_SPEC, make_random_model
from noria_bench.device.serving import ServingSetup, run_engine_loop, set_up
from noria_bench.device.step_timing import time_calls
from noria_bench.load.workload import MIXES
from noria_bench.measurement.provenance import collect_provenance

CALLS = {SD15: ((512, 1), (512, 2), (512, 4), (512, 8)), SDXL: ((512, 2), (512, 4), (512, 8), (1024, 2))}
USERS = (1, 2, 4, 8)
NUM_ROUNDS, NUM_CALLS, SERVED_S = 3, 10, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    output = parser.parse_args().output
    device = choose_device("auto")
    if device.type != "cuda":
        parser.exit(1, "torch sees no GPU here, and CUDA graphs are for GPUs.\n")
    provenance = collect_provenance()
    dtype = choose_dtype("auto", device)
    result = provenance | {"device": describe_device(device, provenance["machine"]["cpu"]), "dtype": dtype}
    result["calls"] = [
        measured for architecture in CALLS for measured in measure_calls(architecture, device, getattr(torch, dtype))
    ]
    result["users"] = measure_users(device, dtype)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure_calls(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the median seconds of a call with and without a graph, and the seconds and bytes of its capture."""
    unet = build_denoiser(architecture, device, dtype)
    graphed, found = GraphedCalls(unet, device), []
    for side_px, rows in CALLS[architecture]:
        inputs = make_inputs(architecture, side_px, rows, device, dtype)
        inputs.predict(graphed)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        inputs.predict(graphed)
        torch.cuda.synchronize()
        capture_s, num_bytes = time.perf_counter() - began, torch.cuda.memory_reserved() - before
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            for has_graphs in seconds:
                with nullcontext() if has_graphs else without_graphs():
                    seconds[has_graphs] += time_calls(partial(inputs.predict, graphed), device, NUM_CALLS)
        eager_s, graph_s = map(statistics.median, seconds.values())
        difference = float((inputs.predict(graphed) - inputs.predict(unet)).abs().max())
        found.append(
            {
                "model": architecture.name,
                "side_px": side_px,
                "rows": rows,
                "eager_s": eager_s,
                "graph_s": graph_s,
                "capture_s": capture_s,
                "capture_bytes": num_bytes,
                "max_difference": difference,
            }
        )
        print(
            f"{architecture.name} {side_px}², {rows} rows: {1000 * eager_s:.1f} ms, in a graph {1000 * graph_s:.1f} ms "
            f"({graph_s / eager_s:.2f}), captured in {capture_s:.2f} s and {num_bytes / 2**20:.0f} MiB, "
            f"difference {difference:.2g}",
            flush=True,
        )
    return found


def measure_users(device: torch.device, dtype: str) -> list[dict[str, Any]]:
    """Return the latency and the rate of users that each wait for their image, with and without graphs, by round."""
    config = resolve_auto(msgspec.convert({"dtype": dtype}, EngineConfig), RANDOM_SPEC, str(device), detect_machine())
    model = make_random_model(device, getattr(torch, dtype), config)
    setup = set_up(DiffusionExecutor(model, config), RANDOM_SPEC, config)
    found = []
    for num_users in USERS:
        for _ in range(2):
            for has_graphs in (False, True):
                with nullcontext() if has_graphs else without_graphs():
                    measured = _serve(setup, num_users, SERVED_S)
                found.append({"users": num_users, "graphs": has_graphs, **measured})
                print(f"{num_users} users, graphs {has_graphs}: {measured}", flush=True)
    return found


def _serve(setup: ServingSetup, num_users: int, seconds: float) -> dict[str, float]:
    began = time.monotonic()
    templates = MIXES["uniform"](setup.spec).templates(1)
    completed = run_engine_loop(setup, templates, began + seconds, num_users).completed
    latencies = [each.done_s - each.sent_s for each in completed]
    images = sum(each.num_images for each in completed)
    return {"median_s": statistics.median(latencies), "images_per_s": images / (completed[-1].done_s - began)}


if __name__ == "__main__":
    main()
