"""One denoising step for a batch of images with any schedulers, step counts and positions; no Python per image.

Each running image has a slot of the history `[S, K, C, H, W]`, laid out as in `tables.py`, and a cursor, the index of
its next call. A step is `model_inputs`, the model, `guide`, `advance`; then the caller increments every cursor.

Rules: all arithmetic is float32, whatever the model's dtype. The result of an image is bitwise independent of its slot,
its position in the batch and the other images. Nothing here waits for the device. This module does not know tables,
requests, prompts or seeds.

Tensor shapes: S slots, B images of this batch, K = NUM_COLUMNS columns of history, C channels, H × W latent size.
"""

import torch

from noria.sampling.tables import NOISE_COLUMN, NUM_COLUMNS, WINDOW


def empty_history(num_slots: int, shape_CHW: tuple[int, int, int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a history `[S, K, C, H, W]` of zeros."""
    return torch.zeros((num_slots, NUM_COLUMNS, *shape_CHW), dtype=torch.float32, device=device)


def init_slot(history_SKCHW: torch.Tensor, slot: int, start_CHW: torch.Tensor) -> None:
    """Initialize `slot` for a new image at cursor 0; `start_CHW` is its initial noise times `init_noise_sigma`.

    Zeroes the slot first: columns with coefficient 0 are multiplied too, and 0 · NaN of the previous image would be
    NaN.
    """
    history_SKCHW[slot].zero_()
    history_SKCHW[slot, 0] = start_CHW.to(history_SKCHW.dtype)


def samples(history_SKCHW: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor) -> torch.Tensor:
    """Return the current samples `[B, C, H, W]`; of an image with its cursor after the last call, the final latent."""
    return history_SKCHW[slots_B, cursors_B % WINDOW]


def model_inputs(
    history_SKCHW: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor, input_scale_B: torch.Tensor
) -> torch.Tensor:
    """Return the model's inputs `[B, C, H, W]`: each current sample times the input scale of its row."""
    return samples(history_SKCHW, slots_B, cursors_B) * _per_image(input_scale_B)


def guide(cond_BCHW: torch.Tensor, uncond_BCHW: torch.Tensor, guidance_B: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance u + g·(c - u) in float32 (Ho and Salimans, 2022, eq. 6 with g = 1 + w).

    An unguided image passes its output as both, with any finite g, and the result equals it exactly.
    """
    cond_BCHW, uncond_BCHW = cond_BCHW.float(), uncond_BCHW.float()
    return uncond_BCHW + _per_image(guidance_B) * (cond_BCHW - uncond_BCHW)


def advance(
    history_SKCHW: torch.Tensor,
    slots_B: torch.Tensor,
    cursors_B: torch.Tensor,
    outputs_BCHW: torch.Tensor,
    noise_BCHW: torch.Tensor | None,
    coefficients_BK: torch.Tensor,
) -> torch.Tensor:
    """Write the model's outputs of call `cursors_B` and the next samples to the history; return these `[B, C, H, W]`.

    `noise_BCHW` is None if no image of the batch draws noise at this call; images that draw none can have any finite
    values there. Slots are distinct, except that padding rows can share one that no image has. Stale history is
    harmless while it is finite: `init_slot` zeroes it, and NaN from the model stays in the slot of its image.
    """
    history_SKCHW[slots_B, WINDOW + cursors_B % WINDOW] = outputs_BCHW.float()
    if noise_BCHW is not None:
        history_SKCHW[slots_B, NOISE_COLUMN] = noise_BCHW.float()
    next_BCHW = _weighted_sum(history_SKCHW[slots_B], coefficients_BK)  # indexing copies
    history_SKCHW[slots_B, (cursors_B + 1) % WINDOW] = next_BCHW
    return next_BCHW


def _weighted_sum(history_BKCHW: torch.Tensor, coefficients_BK: torch.Tensor) -> torch.Tensor:
    """Return Σ_k coefficients[b, k] · history[b, k], by a product and a fixed tree of additions in `history_BKCHW`.

    A matrix product would be shorter, but its order of summation depends on the batch size, and a GPU may compute it in
    TF32. Elementwise additions always round the same way.
    """
    terms_BKCHW = history_BKCHW.mul_(coefficients_BK[:, :, None, None, None])
    halves = terms_BKCHW[:, :WINDOW].add_(terms_BKCHW[:, WINDOW:NOISE_COLUMN])
    quarters = halves[:, 0::2].add_(halves[:, 1::2])
    return quarters[:, 0].add_(quarters[:, 1]) + terms_BKCHW[:, NOISE_COLUMN]


def _per_image(values_B: torch.Tensor) -> torch.Tensor:
    """Reshape `values_B` to multiply a `[B, C, H, W]`."""
    return values_B[:, None, None, None]
