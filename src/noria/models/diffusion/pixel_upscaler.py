"""Reads a file of an upscaler of pixels by spandrel, which tells ESRGAN, SwinIR, DAT and others by their tensors.

The file may be hostile: a pickle is read as weights alone, and runs no code. A tile of an image is enlarged in one
call; its neighbours' pixels are in it as a margin.

Shapes: B tiles of one size.
"""

import pathlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from noria.errors import ModelError
from noria.extras import require
from noria.models.adapters.upscaler_folders import EXTRA, PACKAGE
from noria.models.diffusion.loras.lora_file import read_tensors
from noria.models.files.weights import file_size_bytes

_MAX_BYTES = 2**30  # ESRGAN's 16.7 million parameters take 67 MB, DAT's and HAT's up to 170
# By what spandrel raises for tensors that have the names of a kind and not its shapes.
_ERRORS_OF_TENSORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class PixelModel:
    """A loaded upscaler."""

    descriptor: Any  # spandrel's ImageModelDescriptor
    scale: int  # 2 or more
    digest: str  # digest of its file
    tile_s: float = 0.0  # seconds of a tile, where it was measured

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters on the device."""
        return sum(each.nbytes for each in self.descriptor.model.parameters())

    def enlarge(self, tiles_BHW3: torch.Tensor) -> torch.Tensor:
        """Return uint8 tiles, `scale` times as wide and high, on the CPU; waits for the device."""
        inputs_B3HW = tiles_BHW3.to(self.descriptor.device).permute(0, 3, 1, 2).to(self.descriptor.dtype) / 255
        outputs_B3HW: torch.Tensor = self.descriptor(inputs_B3HW).float().clamp(0, 1)
        return (outputs_B3HW.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).cpu()


def load_pixel_model(file: pathlib.Path, digest: str, device: torch.device, dtype: torch.dtype) -> PixelModel:
    """Return the upscaler in `file` on `device`, in `dtype` if it supports that, else in float32.

    Raises:
        MissingExtra: spandrel is not installed.
        ModelError: the file is damaged, has code in it, is of a kind that is not known, or is no upscaler of RGB.

    """
    try:
        spandrel = require(PACKAGE, EXTRA, f"the upscaler {file.stem}")
    except (ImportError, OSError, RuntimeError) as error:  # as of torchvision where torch is another build
        raise ModelError(f"{file.name}: {PACKAGE} cannot be imported: {error}.") from error
    try:
        descriptor = spandrel.ModelLoader(device="cpu").load_from_state_dict(_read(file))
    except spandrel.UnsupportedModelError as error:
        raise ModelError(f"{file.name}: spandrel knows no upscaler with these tensors.") from error
    except _ERRORS_OF_TENSORS as error:
        raise ModelError(f"{file.name}: its tensors are not those of an upscaler: {error}.") from error
    channels = descriptor.input_channels, descriptor.output_channels
    if not isinstance(descriptor, spandrel.ImageModelDescriptor) or channels != (3, 3):
        raise ModelError(f"{file.name}: is no upscaler of images in RGB, but {descriptor.architecture.name}.")
    if descriptor.scale < 2:
        raise ModelError(f"{file.name}: enlarges images {descriptor.scale} times; allowed is 2 or more.")
    supports = {torch.float16: descriptor.supports_half, torch.bfloat16: descriptor.supports_bfloat16}
    descriptor.eval().to(device, dtype if supports.get(dtype) else torch.float32)
    return PixelModel(descriptor, descriptor.scale, digest)


def _read(file: pathlib.Path) -> dict[str, Any]:
    """Return what is in a file. Raises ModelError: it is too large, damaged, or has code in it."""
    if file.suffix == ".safetensors":
        return dict(read_tensors(file, _MAX_BYTES)[0])
    if (num_bytes := file_size_bytes(file)) > _MAX_BYTES:
        raise ModelError(f"{file.name}: has {num_bytes} bytes; at most {_MAX_BYTES} are allowed.")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file.name}: is a pickle with more than weights in it, which could run any code, or is damaged. Convert "
            "it to .safetensors where you trust it."
        ) from error
    except (EOFError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{file.name}: is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file.name}: has no tensors by name in it.")
    return found
