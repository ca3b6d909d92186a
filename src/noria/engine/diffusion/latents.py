"""The slots' tensor on the device: each image's history of samples and model outputs.

Images of all sizes share it: a slot is as large as the largest of them needs, and a smaller one uses the beginning of
each column. So it takes as much memory as one size does, however many there are. It has as many slots as are used at
once, the lowest ones: those that are not used take no memory.

Shapes: S slots, K columns of history (defined in `sampling/tables.py`), E elements of an image's latents.
"""

import math

import torch

from noria.sampling.step import empty_history, widen
from noria.sampling.tables import ring_window, window_of

MAX_IDLE_BYTES = 256 * 2**20
"""Of a history that no image uses, kept because allocating and zeroing it again delays a join."""


class LatentSlots:
    """The history of the running images, as wide and as large as they need; allocated when they join."""

    def __init__(self, num_slots: int, device: torch.device, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        """`num_slots` is the largest number of slots, of which images take the lowest free ones."""
        self._num_slots, self._device, self._max_idle_bytes = num_slots, device, max_idle_bytes
        self._history_SKE = empty_history(0, 0, 1, device)

    @property
    def nbytes(self) -> int:
        """Bytes of the history on the device."""
        return self._history_SKE.nbytes

    def of(self, shape: tuple[int, ...]) -> torch.Tensor:
        """[S, K, E] float32, a view of the slots for images with latents of `shape`."""
        return self._history_SKE[:, :, : math.prod(shape)]

    def join(self, shape: tuple[int, ...], window: int, slot: int, *, is_first: bool) -> torch.Tensor:
        """Return `of(shape)` for another image in `slot`, whose table looks back `window` calls.

        Makes the history larger or wider where necessary; running images keep what they have. If it `is_first` and no
        other image uses the history, a large one is allocated anew.
        """
        assert slot < self._num_slots, slot
        if is_first and self.nbytes > self._max_idle_bytes:
            self._history_SKE = empty_history(0, 0, 1, self._device)
        history_SKE = self._history_SKE
        num_slots, _, num_elements = history_SKE.shape
        if (window := ring_window(window)) > window_of(history_SKE.shape[1]):
            history_SKE = widen(history_SKE, window)
        if slot >= num_slots or math.prod(shape) > num_elements:
            more_slots = num_slots if slot < num_slots else min(max(slot + 1, 2 * num_slots), self._num_slots)
            more_elements, window = max(math.prod(shape), num_elements), window_of(history_SKE.shape[1])
            larger_SKE = empty_history(more_slots, more_elements, window, self._device)
            larger_SKE[:num_slots, :, :num_elements] = history_SKE
            history_SKE = larger_SKE
        self._history_SKE = history_SKE
        return self.of(shape)
