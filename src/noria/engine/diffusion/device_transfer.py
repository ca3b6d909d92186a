"""Transfers between the host and the device that do not block the loop.

The reader of data that goes to the host waits for its copy event.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from noria.errors import GenerationFailed


@dataclass(frozen=True)
class HostPixels:
    """Pixels in host memory, or being copied there."""

    pixels_HWC: torch.Tensor
    finite: torch.Tensor  # bool, one element: whether the image's latents are finite
    copied: "torch.cuda.Event | None"  # None: no copy is pending

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels_HWC.shape[1], self.pixels_HWC.shape[0]

    def rgb(self) -> memoryview:
        """Height × width × 3 bytes; waits for the copy.

        Raises `errors.GenerationFailed` if the latents are not finite.
        """
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            raise GenerationFailed(
                "the model's latents are not finite: float16 overflows in some models; try another dtype or scheduler"
            )
        return self.pixels_HWC.numpy().data.cast("B")


def to_device(values: "Sequence[int] | np.ndarray", device: torch.device) -> torch.Tensor:
    """Start copying numbers to the device; work that is queued on it later sees them."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, "torch.cuda.Event | None"]:
    """Start copying the tensor to pinned host memory; its content is valid after the event.

    A CPU tensor is returned as it is.
    """
    if not tensor.is_cuda:
        return tensor, None
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return pinned, _recorded()


def copy_to_host(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, "torch.cuda.Event | None"]:
    """Start copying equal tensors to the host's memory, as one; its content is valid after the event.

    CPU tensors are copied at once.
    """
    first = tensors[0]
    stacked = torch.empty(len(tensors), *first.shape, dtype=first.dtype, pin_memory=first.is_cuda)
    for copy, tensor in zip(stacked, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    return stacked, _recorded() if first.is_cuda else None


def _recorded() -> torch.cuda.Event:
    """Return the event that what is queued on the device is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
