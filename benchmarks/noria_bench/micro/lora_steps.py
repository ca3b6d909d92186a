"""Measures the cost of LoRA adapters in a step: their time over that of the bare UNet, in turn in one process.

python -m noria_bench.micro.lora_steps [-o FILE]

The adapters change all linear layers of the attention blocks, as kohya's do by default, and have random matrices. All
rows have one; either all the same, or each guided image (two rows) its own.
"""

import argparse
import json
import os
import pathlib
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapter, Adapters
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.models.diffusion.lora_file import LoraLayer, LoraWeights
from noria_bench.device.architectures import SD15, Architecture, build_denoiser, bundled_architecture, make_inputs
from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
from noria_bench.device.step_timing import time_calls
from noria_bench.measurement.provenance import collect_provenance

RANKS = (16, 64)
NUM_ROUNDS, NUM_CALLS = 4, 2


@dataclass(frozen=True)
class Case:
    """A UNet and its batch."""

    architecture: Architecture
    side_px: int
    rows: int  # two for each image


def main() -> None:
    # As the supervisor sets it for engines; read by OpenMP with its first parallel work.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    output = parser.parse_args().output
    device = choose_device("auto")
    provenance = collect_provenance()
    dtype = choose_dtype("auto", device)
    result = provenance | {"device": describe_device(device, provenance["machine"]["cpu"]), "dtype": dtype, "cases": []}
    published = Case(SD15, 512, 16) if device.type == "cuda" else Case(SD15, 128, 2)  # one image is much for a CPU
    for case in (Case(bundled_architecture(), 128, 16), published):
        result["cases"].append(measure(case, device, getattr(torch, dtype)))
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the median seconds of a step without adapters, and with adapters also their ratio to it."""
    unet = build_denoiser(case.architecture, device, dtype).to(memory_format=torch.channels_last)
    inputs = make_inputs(case.architecture, case.side_px, case.rows, device, dtype)
    lora_rows = LoraRows("unet", unet)
    num_images = case.rows // 2
    variants: dict[tuple[int, int], list[Adapters]] = {(0, 0): [NO_ADAPTERS] * case.rows}
    for rank in RANKS:
        sets = [_random_adapters(unet, rank, number) for number in range(num_images)]
        variants[rank, 1] = [sets[0]] * case.rows
        variants[rank, num_images] = sets * 2  # the rows with and without a prompt of each image
    seconds: dict[tuple[int, int], list[float]] = {variant: [] for variant in variants}
    for _ in range(NUM_ROUNDS):
        for variant, adapters in variants.items():
            lora_rows.clear()
            with lora_rows.applied(adapters):
                inputs.predict(unet)  # not measured: the step that stacks matrices is not the usual one
                seconds[variant] += time_calls(lambda: inputs.predict(unet), device, NUM_CALLS)
    bare_s = statistics.median(seconds.pop((0, 0)))
    name = f"{case.architecture.name} {case.side_px}², {case.rows} rows"
    print(f"{name}: {1000 * bare_s:.1f} ms")
    steps = []
    for (rank, num_adapters), each in seconds.items():
        step_s = statistics.median(each)
        steps.append({"rank": rank, "adapters": num_adapters, "step_s": step_s, "ratio": step_s / bare_s})
        print(f"  rank {rank}, adapters {num_adapters}: {1000 * step_s:.1f} ms, ratio {step_s / bare_s:.3f}")
    return {
        "model": case.architecture.name,
        "side_px": case.side_px,
        "rows": case.rows,
        "step_s": bare_s,
        "with_adapters": steps,
    }


def _random_adapters(unet: Any, rank: int, number: int) -> Adapters:
    """Return a set of one adapter, whose matrices are small enough to change nothing much."""
    generator = torch.Generator().manual_seed(number)
    layers = {}
    for name, module in unet.named_modules():
        if ".attentions." in name and isinstance(module, torch.nn.Linear):
            down, up = (
                0.01 * torch.randn(shape, generator=generator).to(module.weight)
                for shape in ((rank, module.in_features), (module.out_features, rank))
            )
            layers[name] = LoraLayer(down, up)
    return Adapters((Adapter(f"{rank}-{number}", LoraWeights({"unet": layers}), 1.0),))


if __name__ == "__main__":
    main()
