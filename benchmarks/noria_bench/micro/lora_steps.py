"""Measures the cost of LoRA adapters in a step: their time over that of the bare UNet, in turn in one process.

python -m noria_bench.micro.lora_steps [-o FILE]

The adapters change all linear layers of the attention blocks, as kohya's do by default, and have random matrices. All
rows have one; either all the same, or each guided image (two rows) its own. A LoHa of rank r is a LoRA of rank r², and
has no case of its own; the LoKr has factor 8, with whole factors.
"""

import argparse
import os
import pathlib
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapter, Adapters
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.models.diffusion.loras.lora_layer import LoraLayer, LoraWeights
from noria_bench.device.architectures import SD15, Architecture, build_denoiser, bundled_architecture, make_inputs
from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
from noria_bench.device.step_timing import time_calls
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import write_json

KINDS = (("lora", 16), ("lora", 64), ("dora", 16), ("dora of inputs", 16), ("lokr", 8))
"""Each with its rank, or factor."""
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
        write_json(result, output)


@torch.inference_mode()
def measure(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the median seconds of a step without adapters, and with adapters also their ratio to it."""
    unet = build_denoiser(case.architecture, device, dtype).to(memory_format=torch.channels_last)
    inputs = make_inputs(case.architecture, case.side_px, case.rows, device, dtype)
    lora_rows = LoraRows("unet", unet)
    num_images = case.rows // 2
    bare = ("", 0, 0)
    variants: dict[tuple[str, int, int], list[Adapters]] = {bare: [NO_ADAPTERS] * case.rows}
    for kind, rank in KINDS:
        sets = [_random_adapters(unet, kind, rank, number) for number in range(num_images)]
        variants[kind, rank, 1] = [sets[0]] * case.rows
        variants[kind, rank, num_images] = sets * 2  # the rows with and without a prompt of each image
    seconds: dict[tuple[str, int, int], list[float]] = {variant: [] for variant in variants}
    for _ in range(NUM_ROUNDS):
        for variant, adapters in variants.items():
            lora_rows.clear()
            with lora_rows.applied(adapters):
                inputs.predict(unet)  # not measured: the step that stacks matrices is not the usual one
                seconds[variant] += time_calls(lambda: inputs.predict(unet), device, NUM_CALLS)
    bare_s = statistics.median(seconds.pop(bare))
    name = f"{case.architecture.name} {case.side_px}², {case.rows} rows"
    print(f"{name}: {1000 * bare_s:.1f} ms")
    steps = []
    for (kind, rank, num_adapters), each in seconds.items():
        step_s = statistics.median(each)
        step = {"kind": kind, "rank": rank, "adapters": num_adapters, "step_s": step_s, "ratio": step_s / bare_s}
        steps.append(step)
        print(f"  {kind} {rank}, adapters {num_adapters}: {1000 * step_s:.1f} ms, ratio {step_s / bare_s:.3f}")
    return {
        "model": case.architecture.name,
        "side_px": case.side_px,
        "rows": case.rows,
        "step_s": bare_s,
        "with_adapters": steps,
    }


def _random_adapters(unet: Any, kind: str, rank: int, number: int) -> Adapters:
    """Return a set of one adapter, whose matrices are small enough to change nothing much."""
    generator = torch.Generator().manual_seed(number)
    layers = {}
    for name, module in unet.named_modules():
        if ".attentions." in name and isinstance(module, torch.nn.Linear):
            layers[name] = _random_layer(module, kind, rank, generator)
    return Adapters((Adapter(f"{kind}-{rank}-{number}", LoraWeights({"unet": layers}), 1.0),))


def _random_layer(module: torch.nn.Linear, kind: str, rank: int, generator: torch.Generator) -> LoraLayer:
    def draw(*shape: int) -> torch.Tensor:
        return 0.01 * torch.randn(shape, generator=generator).to(module.weight)

    num_inputs, num_outputs = module.in_features, module.out_features
    if kind == "lokr":
        return LoraLayer(left=draw(rank, rank), right=draw(num_outputs // rank, num_inputs // rank))
    return LoraLayer(
        draw(rank, num_inputs),
        draw(num_outputs, rank),
        output_gain=draw(num_outputs) if kind == "dora" else None,
        input_gain=draw(num_inputs) if kind == "dora of inputs" else None,
    )


if __name__ == "__main__":
    main()
