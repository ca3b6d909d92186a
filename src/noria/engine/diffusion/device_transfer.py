"""Pixels on their way from the device: the wheel turns on, whoever delivers them waits."""

from dataclasses import dataclass

import torch

from noria.errors import GenerationFailed


@dataclass(frozen=True)
class HostPixels:
    """Pixels that are, or are being copied to, the host's memory."""

    pixels_HWC: torch.Tensor
    finite: torch.Tensor  # bool, one element: whether the latents were
    copied: "torch.cuda.Event | None"

    def rgb(self) -> memoryview:
        """Height × width × 3 bytes; waits for the copy. Raises `errors.GenerationFailed` if the model's numbers overflowed."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            raise GenerationFailed(
                "the model's latents are not finite: float16 overflows in some models; try another dtype or scheduler"
            )
        return self.pixels_HWC.numpy().data.cast("B")


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, "torch.cuda.Event | None"]:
    """The tensor in the host's memory once the event has happened; the wheel turns on, whoever delivers it waits."""
    if not tensor.is_cuda:
        return tensor, None
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return pinned, copied
