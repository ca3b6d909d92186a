"""The bytes of the weights of an image model, by part and device, before it is loaded."""

import math
import pathlib
from collections.abc import Set
from dataclasses import dataclass, field

from noria.config import EngineConfig
from noria.models.adapters.controlnet_folders import ControlNetFolders
from noria.models.adapters.ip_adapter_files import IpAdapterFiles
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.models.adapters.safety_folders import SafetyFolders
from noria.models.diffusion.block_quantization import check_streamable, denoiser_part, quantized_bytes
from noria.models.diffusion.weight_blocks import NUM_BUFFERS, blocks_of, buffer_sizes, choose_streamed, is_streamed
from noria.models.families import FAMILIES
from noria.models.files.weights import read_weights, weight_bytes
from noria.protocol.diffusion import DiffusionModelSpec

FLOAT32_BYTES = 4

SAFETY_CLASSIFIER = "safety classifier"
"""The name of that part."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes by part: of those on the model's device, and of those on `engine.text_encoder_device` if it is another."""

    here: dict[str, int]
    elsewhere: dict[str, int]
    streamed: dict[str, int] = field(default_factory=dict)  # in the host's memory, by `engine.offload`

    def without(self, parts: Set[str]) -> "WeightBytes":
        """Return those of the other parts."""
        here, elsewhere = (
            {part: num_bytes for part, num_bytes in each.items() if part not in parts}
            for each in (self.here, self.elsewhere)
        )
        return WeightBytes(here, elsewhere, self.streamed)


def weights_of(spec: DiffusionModelSpec, config: EngineConfig) -> WeightBytes:
    """Return the bytes of a model with `config`, which has no "auto" left: all parts, and what is beside them.

    LoRAs are loaded when requests name them. They count with the bytes of their files, at most those of their cache.

    Raises ModelError: a part would stream whose weights are quantized.
    """
    item_bytes = FLOAT32_BYTES if config.dtype == "float32" else 2
    stems = FAMILIES[spec.family].weight_stems
    here = {part: weight_bytes(spec.path, part, stem, item_bytes) for part, stem in stems.items()}
    streamed = _take_streamed(here, spec, config, item_bytes)
    if config.quantize != "none":
        here[denoiser_part(spec)] = quantized_bytes(spec, config.quantize, item_bytes)
    if (refiner := RefinerFolders.of(config).for_model(spec)) is not None:
        here |= {f"refiner's {part}": num_bytes for part, num_bytes in refiner.weight_bytes(spec, item_bytes).items()}
    elsewhere: dict[str, int] = {}
    if config.text_encoder_device != "same":
        elsewhere = text_weights_of(spec, config, FLOAT32_BYTES if config.text_encoder_device == "cpu" else item_bytes)
        here = {part: num_bytes for part, num_bytes in here.items() if part not in elsewhere}
    for name, folder in ControlNetFolders.of(config).for_model(spec).items():
        here[f"ControlNet {name}"] = item_bytes * folder.num_parameters
    for name, file in IpAdapterFiles.of(config).for_model(spec).items():
        here[f"IP-Adapter {name}"] = item_bytes * file.num_parameters
        here[f"image encoder {file.encoder_digest}"] = item_bytes * file.num_encoder_parameters
    if (rule := SafetyFolders.of(config).for_model(spec)) is not None:
        here[SAFETY_CLASSIFIER] = FLOAT32_BYTES * rule.folder.num_parameters
    loras = sum(_file_bytes(file) for file in LoraFolders.of(config).files(spec.name).values())
    if loras:
        here["LoRAs"] = min(loras, config.lora_cache_bytes)
    return WeightBytes(here, elsewhere, streamed)


def _take_streamed(
    here: dict[str, int], spec: DiffusionModelSpec, config: EngineConfig, item_bytes: int
) -> dict[str, int]:
    """Take out of `here` what streams, add the buffers, and return the bytes that stream, by part."""
    taken: dict[str, int] = {}
    buffers = [0] * NUM_BUFFERS
    for part, stem in FAMILIES[spec.family].weight_stems.items():
        if not is_streamed(config, part):
            continue
        check_streamable(spec, part)
        shapes = read_weights(spec.path, part, stem)
        blocks = [
            sum(item_bytes * math.prod(shapes[name]) for name in names) for names in blocks_of(part, shapes).values()
        ]
        resident = config.offload_resident_bytes if part == denoiser_part(spec) else 0
        chosen = choose_streamed(blocks, 0 if resident == "auto" else resident)
        sizes = [size for size, streams in zip(blocks, chosen, strict=True) if streams]
        buffers = list(map(max, buffers, buffer_sizes(sizes, alternate=part != "vae")))
        here[part] -= sum(sizes)
        taken[part] = sum(sizes)
    if taken:
        here["offload buffers"] = sum(buffers)
    return {part: num_bytes for part, num_bytes in taken.items() if num_bytes}


def _file_bytes(file: pathlib.Path) -> int:
    """Return the size of a file; 0 if it was removed meanwhile."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def text_weights_of(spec: DiffusionModelSpec, config: EngineConfig, item_bytes: int) -> dict[str, int]:
    """Return the bytes of the text encoders by part, that of a refiner too, if a number has `item_bytes`."""
    stems = FAMILIES[spec.family].weight_stems
    found = {
        part: weight_bytes(spec.path, part, stem, item_bytes)
        for part, stem in stems.items()
        if part.startswith("text_encoder")
    }
    if (refiner := RefinerFolders.of(config).for_model(spec)) is not None:
        weights = refiner.weight_bytes(spec, item_bytes)
        found |= {f"refiner's {part}": num for part, num in weights.items() if part.startswith("text_encoder")}
    return found


def weights_to_load(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> WeightBytes:
    """Return the bytes of a model's weights as `weights_of`, without what it shares with models of this process."""
    from noria.models.diffusion.ip_adapter import loaded_encoders
    from noria.models.diffusion.safety_classifier import is_loaded
    from noria.models.diffusion.unet_models.controlnet import loaded_controlnets
    from noria.models.diffusion.unet_models.refiner import loaded_refiner_parts

    shared = {f"ControlNet {name}" for name in loaded_controlnets(spec, config, device)}
    shared |= {f"image encoder {digest}" for digest in loaded_encoders(spec, config, device)}
    shared |= {f"refiner's {part}" for part in loaded_refiner_parts(spec, config, device)}
    rule = SafetyFolders.of(config).for_model(spec)
    shared |= {SAFETY_CLASSIFIER} if rule is not None and is_loaded(rule, device) else set()
    return weights_of(spec, config).without(shared)
