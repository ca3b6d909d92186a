"""Measures FLUX.1 steps whose blocks stream from the host's memory, beside diffusers' group offloading.

python -m noria_bench.micro.offloaded_steps [--small] [-o FILE]

The allocator is limited to the memory of a card of 24 GB. With --small the denoiser is tiny, on the CPU, without limit.
"""

import argparse
import pathlib
import statistics
from functools import partial
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.weight_streaming import WeightStreamer
from noria_bench.device.architectures import FLUX, Architecture, build_denoiser, make_inputs
from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
from noria_bench.device.step_timing import synchronise, time_calls
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.micro.faster_steps import small
from noria_bench.running import write_json

LIMIT_BYTES = 24 * 10**9
# Bytes of blocks that stay, and the rows of the calls.
RESIDENT_BYTES, ROWS = (0, 14 * 10**9), (1, 2, 4)
_NUM_CALLS = 3


class Denoisers:
    """Copies of one denoiser on the host."""

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self._architecture, self._device, self._dtype = architecture, device, dtype
        self._weights = {
            name: each.cpu() for name, each in build_denoiser(architecture, device, dtype).state_dict().items()
        }

    def on_host(self) -> Any:
        """Return a denoiser in the host's memory."""
        denoiser = build_denoiser(self._architecture, "meta", self._dtype)
        denoiser.load_state_dict(self._weights, assign=True)
        return denoiser.requires_grad_(requires_grad=False)

    def resident(self) -> Any:
        """Return it on the device."""
        return self.on_host().to(self._device)

    def streamed(self, resident_bytes: int) -> Any:
        """Return it with blocks that stream, beyond these bytes."""
        config = EngineConfig(offload="blocks", offload_resident_bytes=resident_bytes)
        denoiser = self.on_host()
        WeightStreamer(config, str(self._device)).add("transformer", denoiser)
        return denoiser

    def group_offloaded(self) -> Any:
        """Return it with diffusers' group offloading of single blocks, with a stream on a GPU."""
        from diffusers.hooks import apply_group_offloading

        denoiser, has_streams = self.on_host(), self._device.type == "cuda"
        apply_group_offloading(
            denoiser,
            onload_device=self._device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=has_streams,
        )
        return denoiser


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()
    device = choose_device("cpu" if arguments.small else "auto")
    if device.type != "cuda" and not arguments.small:
        parser.exit(1, "torch sees no GPU here; --small measures a tiny denoiser on the CPU.\n")
    dtype = getattr(torch, choose_dtype("auto", device))
    architecture, side_px = (small(FLUX), 64) if arguments.small else (FLUX, 1024)
    denoisers = Denoisers(architecture, device, dtype)
    provenance = collect_provenance()
    result: dict[str, Any] = provenance | {
        "device": describe_device(device, provenance["machine"]["cpu"]),
        "limit_bytes": LIMIT_BYTES if device.type == "cuda" else None,
        "calls": [],
    }
    cases = [("resident", denoisers.resident)]
    cases += [(f"{num} bytes of blocks resident", partial(denoisers.streamed, num)) for num in RESIDENT_BYTES]
    cases.append(("diffusers' group offloading", denoisers.group_offloaded))
    expected: dict[int, torch.Tensor] = {}
    for name, make in cases:
        if device.type == "cuda" and name != "resident":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_BYTES / total), device)
        denoiser = make()
        for rows in ROWS:
            measured = _measure(architecture, denoiser, side_px, rows, dtype, device, expected)
            result["calls"].append({"name": name, "side_px": side_px, "rows": rows} | measured)
            print(
                f"{name}, {rows} rows: {1000 * measured['step_s']:.1f} ms, {measured['peak_bytes'] / 1e9:.2f} GB, "
                f"differs by {measured['max_difference']:.2g}",
                flush=True,
            )
            if arguments.output is not None:
                write_json(result, arguments.output)
        del denoiser


@torch.no_grad()
def _measure(
    architecture: Architecture,
    denoiser: Any,
    side_px: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    expected: dict[int, torch.Tensor],
) -> dict[str, Any]:
    """Return the median seconds of a call, the GPU's peak, and the difference to the first outputs for so many rows."""
    step = partial(make_inputs(architecture, side_px, rows, device, dtype).predict, denoiser)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step()
    output = step().float().cpu()  # blocks come in the order of the first call
    synchronise(device)
    return {
        "step_s": statistics.median(time_calls(step, device, _NUM_CALLS)),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "max_difference": float((output - expected.setdefault(rows, output)).abs().max()),
    }


if __name__ == "__main__":
    main()
