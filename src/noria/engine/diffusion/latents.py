"""The slots' tensors on the device: each image's history of samples and model outputs.

Shapes: S slots, K history entries (defined in `sampling/tables.py`), C × H × W latents.
"""

import torch

from noria.sampling.step import empty_history
from noria.scheduling.types import BatchKey

_MAX_IDLE_HISTORIES = 4


class LatentSlots:
    """Histories by batch key, allocated when the first image of a key joins; few unused ones are kept."""

    def __init__(self, num_slots: int, channels: int, latent_scale: int, device: torch.device) -> None:
        self._num_slots, self._channels, self._scale, self._device = num_slots, channels, latent_scale, device
        self._histories: dict[BatchKey, torch.Tensor] = {}

    def size(self, batch_key: BatchKey) -> tuple[int, int, int]:
        """[C, H, W] of one image's latents."""
        return self._channels, batch_key.height_px // self._scale, batch_key.width_px // self._scale

    def history(self, batch_key: BatchKey, in_use: set[BatchKey]) -> torch.Tensor:
        """[S, K, C, H, W] float32 of `batch_key`; may free those of keys not `in_use`, least recently used first."""
        history = self._histories.pop(batch_key, None)
        if history is None:
            idle = [other for other in self._histories if other not in in_use]
            for other in idle[: max(0, len(self._histories) - _MAX_IDLE_HISTORIES + 1)]:
                del self._histories[other]
            history = empty_history(self._num_slots, self.size(batch_key), self._device)
        self._histories[batch_key] = history
        return history
