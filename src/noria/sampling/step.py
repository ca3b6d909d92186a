"""A denoising step for a batch of images with any schedulers, step counts and positions; no Python per image.

Each running image has a slot of the history `[S, K, E]` and a cursor, the index of its next call. The columns are laid
out as in `tables.py`, for the history's own window: the smallest of `WINDOWS` that no image's table exceeds. A step is
`model_inputs`, the model with its guidance, `next_samples`, `write_samples`; then the caller increments every cursor.

Rules: all arithmetic is float32, whatever the model's dtype. The result of an image is bitwise independent of its slot,
its position in the batch, the other images and the window. Nothing here waits for the device. This module does not know
tables, requests, prompts, seeds or the shape of latents.

Tensor shapes: S slots, B images of this batch, M of them with a mask, K columns of history, E elements of an image's
latents.
"""

from dataclasses import dataclass

import torch

from noria.sampling.tables import num_columns, window_of

_AXIS = 1  # the axis of the columns


@dataclass(frozen=True)
class KeptLatents:
    """The next samples of images with a mask, where they are not repainted."""

    indices_M: torch.Tensor  # indices of these images in the batch
    repainted_ME: torch.Tensor  # bool
    latents_ME: torch.Tensor


def empty_history(num_slots: int, num_elements: int, window: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a history `[S, K, E]` of zeros for tables of at most `window`."""
    return torch.zeros((num_slots, num_columns(window), num_elements), dtype=torch.float32, device=device)


def widen(history_SKE: torch.Tensor, window: int) -> torch.Tensor:
    """Return the history with a larger window, in which every running image continues at its cursor.

    Each column is copied to every place that it could have: an image that looks back `w` calls reads only the copies in
    the places of its last `w` calls.
    """
    old = window_of(history_SKE.shape[_AXIS])
    samples_SWE, outputs_SWE, noise_S1E = torch.split(history_SKE, [old, old, 1], dim=_AXIS)
    copies = window // old
    return torch.cat([samples_SWE] * copies + [outputs_SWE] * copies + [noise_S1E], dim=_AXIS)


def clear_slot(history_SKE: torch.Tensor, slot: int) -> None:
    """Zero `slot`: columns with coefficient 0 are multiplied, too, and 0 · NaN of the previous image would be NaN."""
    history_SKE[slot].zero_()


def init_slot(history_SKE: torch.Tensor, slot: int, start: torch.Tensor, cursor: int = 0) -> None:
    """Initialize `slot` for an image that begins at `cursor`; `start`, of any shape, is its first sample."""
    clear_slot(history_SKE, slot)
    history_SKE[slot, cursor % window_of(history_SKE.shape[_AXIS])] = start.flatten().to(history_SKE.dtype)


def samples(history_SKE: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor) -> torch.Tensor:
    """Return the current samples `[B, E]`; of an image with its cursor after the last call, the final latent."""
    return history_SKE[slots_B, cursors_B % window_of(history_SKE.shape[_AXIS])]


def model_inputs(
    history_SKE: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor, input_scale_B: torch.Tensor
) -> torch.Tensor:
    """Return the model's inputs `[B, E]`: each current sample times the input scale of its row."""
    return samples(history_SKE, slots_B, cursors_B) * input_scale_B[:, None]


def next_samples(
    history_SKE: torch.Tensor,
    slots_B: torch.Tensor,
    cursors_B: torch.Tensor,
    outputs_BE: torch.Tensor,
    noise_BE: torch.Tensor | None,
    coefficients_BK: torch.Tensor,
    kept: KeptLatents | None = None,
) -> torch.Tensor:
    """Write the model's outputs of call `cursors_B` to the history; return the next samples `[B, E]`.

    Can be repeated until these are written.

    The coefficients are laid out for the history's window. `noise_BE` is None if no image of the batch draws noise at
    this call; images that draw none can have any finite values there. Slots are distinct, except that padding rows can
    share one that no image has. Stale history is harmless while it is finite: `init_slot` zeroes it, and NaN from the
    model stays in the slot of its image.
    """
    window = window_of(history_SKE.shape[_AXIS])
    history_SKE[slots_B, window + cursors_B % window] = outputs_BE.float()
    if noise_BE is not None:
        history_SKE[slots_B, 2 * window] = noise_BE.float()
    next_BE = _weighted_sum(history_SKE[slots_B], coefficients_BK)  # indexing copies
    if kept is not None:
        next_BE[kept.indices_M] = torch.where(kept.repainted_ME, next_BE[kept.indices_M], kept.latents_ME)
    return next_BE


def write_samples(
    history_SKE: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor, next_BE: torch.Tensor
) -> None:
    """Write the samples after call `cursors_B`; then every cursor is one higher."""
    history_SKE[slots_B, (cursors_B + 1) % window_of(history_SKE.shape[_AXIS])] = next_BE


def _weighted_sum(history_BKE: torch.Tensor, coefficients_BK: torch.Tensor) -> torch.Tensor:
    """Return Σ_k coefficients[b, k] · history[b, k], by a product and a fixed tree of additions in `history_BKE`.

    A matrix product would be shorter, but its order of summation depends on the batch size, and a GPU may compute it in
    TF32. Elementwise additions always round the same way. The tree halves the window, so that a narrower window, which
    only leaves out zeros, adds in the same order.
    """
    window = window_of(history_BKE.shape[_AXIS])
    terms_BKE = history_BKE.mul_(coefficients_BK[:, :, None])
    sums = terms_BKE[:, :window].add_(terms_BKE[:, window : 2 * window])
    while sums.shape[_AXIS] > 1:
        sums = sums[:, 0::2].add_(sums[:, 1::2])
    return sums[:, 0] + terms_BKE[:, 2 * window]
