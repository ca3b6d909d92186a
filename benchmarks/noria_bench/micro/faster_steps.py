"""Measures what makes calls of a few rows faster: CUDA graphs, compilation, fp8, half of the calls, and all together.

python -m noria_bench.micro.faster_steps --models NAMES [--small] [-o FILE]

Denoisers have published sizes and random weights; with --small they are tiny, on the CPU. UNets are compiled as a
whole, transformers by blocks, as with `engine.compile` and `engine.compile_blocks`.
"""

import argparse
import gc
import importlib.util
import math
import pathlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from noria.models.diffusion.block_compilation import compile_blocks
from noria.models.diffusion.block_quantization import PACKAGES, has_float8, quantize_blocks
from noria_bench.device.architectures import (
    FLUX,
    SD15,
    SDXL,
    Z_IMAGE,
    Architecture,
    build_denoiser,
    flops_of_row,
    make_inputs,
)
from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
from noria_bench.device.step_timing import Step, capture_graph, measure_matrix_peak, synchronise, time_calls
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import write_json

Mode = Literal["eager", "graphs", "compiled", "compiled graphs", "compiled fp8"]

# Sides in pixels and rows of the calls.
CALLS = {SD15: (512, (16,)), SDXL: (1024, (8,)), FLUX: (1024, (1, 4)), Z_IMAGE: (1024, (1, 4))}
_OF_UNETS: tuple[Mode, ...] = ("eager", "graphs", "compiled", "compiled graphs")
_OF_TRANSFORMERS: tuple[Mode, ...] = ("eager", "compiled", "compiled fp8")
_SMALL_SIDE_PX = 128  # below, the deepest layer of a UNet has one latent, which its norm rejects
_SMALL: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1},
    "sdxl": {"block_out_channels": (32, 32, 32), "layers_per_block": 1, "transformer_layers_per_block": (1, 1, 1),
             "attention_head_dim": 4},
    "flux": {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2},
    "z-image": {"dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2},
}  # fmt: skip


def small(architecture: Architecture) -> Architecture:
    """The architecture with few layers, channels, tokens and steps, as `NAME-small`."""
    name, config = architecture.name, architecture.config | _SMALL[architecture.name]
    return replace(architecture, name=f"{name}-small", config=config, default_steps=4, num_tokens=16)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [each.name for each in CALLS]
    parser.add_argument("--models", type=lambda text: text.split(","), default=names, metavar="NAMES")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in names]:
        parser.error(f"--models: {unknown[0]!r} is not one of {', '.join(names)}")
    device = choose_device("cpu" if arguments.small else "auto")
    if device.type != "cuda" and not arguments.small:
        parser.exit(1, "torch sees no GPU here; --small measures tiny denoisers on the CPU.\n")
    dtype = choose_dtype("auto", device)
    provenance = collect_provenance()
    result: dict[str, Any] = provenance | {
        "device": describe_device(device, provenance["machine"]["cpu"]),
        "dtype": dtype,
        "peak_flops_per_s": measure_matrix_peak(device, getattr(torch, dtype)),
        "calls": [],
        "notes": [],
    }
    for architecture, (side_px, rows) in CALLS.items():
        if architecture.name in arguments.models:
            given = (small(architecture), _SMALL_SIDE_PX, (1,)) if arguments.small else (architecture, side_px, rows)
            _measure_all(*given, device=device, result=result)
            if arguments.output is not None:
                write_json(result, arguments.output)


def _measure_all(
    architecture: Architecture, side_px: int, rows: tuple[int, ...], device: torch.device, result: dict[str, Any]
) -> None:
    """Measure one denoiser in all modes that work here; append to the result and print."""
    for mode in _modes(architecture, device, result["notes"]):
        denoiser = build_denoiser(architecture, device, getattr(torch, result["dtype"]))
        if mode == "compiled fp8":
            quantize_blocks(denoiser, "fp8", str(device))
        called = denoiser
        if mode.startswith("compiled"):
            called = _compiled(architecture, denoiser)
        for count in rows if mode != "compiled fp8" else rows[:1]:
            dtype, peak = getattr(torch, result["dtype"]), result["peak_flops_per_s"]
            measured = measure(architecture, called, side_px, count, mode, dtype=dtype, device=device, peak=peak)
            result["calls"].append(measured)
            print(
                f"{architecture.name} {side_px}², {count} rows, {mode}: {1000 * measured['step_s']:.1f} ms, "
                f"{100 * measured['peak_share']:.0f} % of peak; an image's calls {measured['calls_s']:.2f} s, half of "
                f"them {measured['half_of_calls_s']:.2f} s; set up in {measured['setup_s']:.0f} s",
                flush=True,
            )
        del denoiser, called
        torch.compiler.reset()
        gc.collect()


def _modes(architecture: Architecture, device: torch.device, notes: list[str]) -> Iterator[Mode]:
    """Yield the modes that this device and these packages can run; the notes say what is left out."""
    for mode in _OF_UNETS if architecture.is_unet else _OF_TRANSFORMERS:
        missing = ""
        if "graphs" in mode and device.type != "cuda":
            missing = "CUDA graphs are for GPUs"
        elif mode == "compiled fp8" and not has_float8(str(device)):
            missing = f"{device} has no float8"
        elif mode == "compiled fp8" and importlib.util.find_spec(PACKAGES["fp8"]) is None:
            missing = f"{PACKAGES['fp8']} is not installed"
        if missing:
            notes.append(f"{architecture.name}, {mode}: left out: {missing}")
            print(notes[-1], flush=True)
        else:
            yield mode


def _compiled(architecture: Architecture, denoiser: Any) -> Any:
    if architecture.is_unet:
        backend = "eager" if denoiser.device.type == "cpu" else "inductor"  # C++ takes minutes: a CPU only traces it
        return torch.compile(denoiser, dynamic=False, backend=backend)
    compile_blocks(denoiser)
    return denoiser


@torch.inference_mode()
def measure(
    architecture: Architecture,
    denoiser: Any,
    side_px: int,
    rows: int,
    mode: Mode,
    *,
    dtype: torch.dtype,
    device: torch.device,
    peak: float,
) -> dict[str, Any]:
    """Return the seconds of a call, of all calls of an image, and of half of them, of which none waits for the host."""
    inputs = make_inputs(architecture, side_px, rows, device, dtype)
    step: Step = partial(inputs.predict, denoiser)
    began = time.perf_counter()
    step()
    synchronise(device)
    if "graphs" in mode:
        step = capture_graph(step, device)
    step()
    synchronise(device)
    setup_s, num_calls = time.perf_counter() - began, architecture.default_steps
    calls_s, half_s = (sum(time_calls(step, device, num)) for num in (num_calls, math.ceil(num_calls / 2)))
    step_s = calls_s / num_calls
    return {
        "model": architecture.name,
        "side_px": side_px,
        "rows": rows,
        "mode": mode,
        "setup_s": setup_s,
        "step_s": step_s,
        "peak_share": rows * flops_of_row(architecture, side_px) / step_s / peak,
        "num_calls": num_calls,
        "calls_s": calls_s,
        "half_of_calls_s": half_s,
    }


if __name__ == "__main__":
    main()
