"""The slots' tensors on the device: each image's history of samples and model outputs.

Shapes: S slots, K columns of history (defined in `sampling/tables.py`), E elements of an image's latents.
"""

import math

import torch

from noria.sampling.step import empty_history, widen
from noria.sampling.tables import ring_window, window_of
from noria.scheduling.types import BatchKey

MAX_IDLE_BYTES = 256 * 2**20
"""Of histories that no image uses, kept because allocating and zeroing them again delays a join."""


class LatentSlots:
    """Histories by batch key, allocated when the first image of a key joins; few unused ones are kept."""

    def __init__(self, num_slots: int, device: torch.device, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._num_slots, self._device, self._max_idle_bytes = num_slots, device, max_idle_bytes
        self._histories: dict[BatchKey, torch.Tensor] = {}  # the most recently joined last

    def __getitem__(self, batch_key: BatchKey) -> torch.Tensor:
        """[S, K, E] float32 of the running images of `batch_key`."""
        return self._histories[batch_key]

    def join(self, batch_key: BatchKey, shape: tuple[int, ...], window: int, in_use: set[BatchKey]) -> torch.Tensor:
        """[S, K, E] float32 for another image with latents of `shape` whose table looks back `window` calls.

        Allocates or widens it where necessary. Frees those of keys not `in_use`, least recently joined first, as far as
        they take more than the maximum.
        """
        self._free_idle(in_use | {batch_key})
        history, window = self._histories.get(batch_key), ring_window(window)
        if history is None:
            history = empty_history(self._num_slots, math.prod(shape), window, self._device)
        elif window > window_of(history.shape[1]):
            history = widen(history, window)
        self._histories.pop(batch_key, None)
        self._histories[batch_key] = history
        return history

    def _free_idle(self, in_use: set[BatchKey]) -> None:
        idle = {key: history.nbytes for key, history in self._histories.items() if key not in in_use}
        num_bytes = sum(idle.values())
        for key, of_key in idle.items():
            if num_bytes <= self._max_idle_bytes:
                break
            del self._histories[key]
            num_bytes -= of_key
