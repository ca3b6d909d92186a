"""Measures packed batches of texts of many lengths beside padded ones, in one process, without a server.

python -m noria_bench.micro.packed_texts FOLDER [--small] [-o FILE]

Padded texts are sorted by length first; packed ones are computed as they come. With --small it is on the CPU.
"""

import argparse
import pathlib
from typing import Any

import msgspec

from noria.config import EngineConfig
from noria.engine.encoder.packing_choice import PackingTimes, measure_packing
from noria.models.catalog import open_model_of
from noria.protocol.text import EncoderModelSpec
from noria_bench.measurement.provenance import collect_provenance

_BATCHES, _SMALL_BATCHES = (8, 32, 128), (8,)
_NUM_ROUNDS = 3  # the fastest packed one counts, with its padded one


class PackingResult(msgspec.Struct, frozen=True):
    """The file that is written."""

    provenance: dict[str, Any]
    device: str
    dtype: str
    times: dict[int, PackingTimes]  # by the texts of a batch


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()

    from noria.engine.encoder.torch_session import TorchSession
    from noria_bench.device.hardware import choose_device, choose_dtype, describe_device

    device = choose_device("cpu" if arguments.small else "auto")
    dtype = choose_dtype("auto", device)
    spec = open_model_of(EncoderModelSpec, str(arguments.model), EngineConfig())
    session = TorchSession(spec, msgspec.convert({"dtype": dtype}, EngineConfig), str(device))
    times = {}
    for num_texts in _SMALL_BATCHES if arguments.small else _BATCHES:
        rounds = [measure_packing(spec, session, batch_texts=num_texts) for _ in range(_NUM_ROUNDS)]
        times[num_texts] = best = min(rounds, key=lambda each: each.packed_s)
        print(
            f"{num_texts} texts: {best.num_tokens / best.padded_s:.0f} tokens/s padded, "
            f"{best.num_tokens / best.packed_s:.0f} packed ({best.padded_s / best.packed_s:.2f}); alone "
            f"{1e3 * best.lone_padded_s:.2f} and {1e3 * best.lone_packed_s:.2f} ms; fidelity {best.fidelity:.5f}",
            flush=True,
        )
    if arguments.output is not None:
        provenance = collect_provenance()
        name = describe_device(device, provenance["machine"]["cpu"])["name"]
        arguments.output.write_bytes(msgspec.json.encode(PackingResult(provenance, name, dtype, times)))


if __name__ == "__main__":
    main()
