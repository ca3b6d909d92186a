"""The one denoising step, for images of any schedulers, step counts and positions at once; no Python per image.

Each image on the wheel has a slot of the history `[S, K, C, H, W]`, laid out as `tables.py` says, and a cursor: the call it is at.
A step is `model_inputs`, the model, `guide`, `advance`; then the caller adds one to every cursor.

Rules: everything is float32, whatever the model's dtype; an image's result does not depend, to the bit, on its slot, its place in the
batch, or who else is in it; nothing here waits for the device. This module does not know tables, requests, prompts or seeds.

Tensor shapes: S slots, B images of this batch, K = NUM_COLUMNS places of history, C channels, H and W of the latent.
"""

import torch

from noria.sampling.tables import NOISE_COLUMN, NUM_COLUMNS, WINDOW


def empty_history(num_slots: int, shape_CHW: tuple[int, int, int], device: torch.device | str = "cpu") -> torch.Tensor:
    """A history `[S, K, C, H, W]` of zeros."""
    return torch.zeros((num_slots, NUM_COLUMNS, *shape_CHW), dtype=torch.float32, device=device)


def init_slot(history_SKCHW: torch.Tensor, slot: int, start_CHW: torch.Tensor) -> None:
    """Give `slot` to a new image whose cursor is 0; `start_CHW` is its initial noise times `init_noise_sigma`.

    The slot is zeroed first: a place with coefficient 0 is still multiplied, and 0 · NaN of the image before would be NaN.
    """
    history_SKCHW[slot].zero_()
    history_SKCHW[slot, 0] = start_CHW.to(history_SKCHW.dtype)


def samples(history_SKCHW: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor) -> torch.Tensor:
    """The current samples `[B, C, H, W]`; of a finished image, whose cursor is its number of calls, the final latent."""
    return history_SKCHW[slots_B, cursors_B % WINDOW]


def model_inputs(
    history_SKCHW: torch.Tensor, slots_B: torch.Tensor, cursors_B: torch.Tensor, input_scale_B: torch.Tensor
) -> torch.Tensor:
    """What the model is given, `[B, C, H, W]`: each image's current sample times its row's input scale."""
    return samples(history_SKCHW, slots_B, cursors_B) * _per_image(input_scale_B)


def guide(cond_BCHW: torch.Tensor, uncond_BCHW: torch.Tensor, guidance_B: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance u + g·(c - u) in float32 (Ho and Salimans, 2022, eq. 6 with g = 1 + w).

    An unguided image passes its output as both, with any finite g, and gets it back exactly.
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
    """Take the model's outputs of call `cursors_B` and return the next samples `[B, C, H, W]`, also written to their ring places.

    `noise_BCHW` is None when no image of the batch draws at this call; an image that does not may have anything finite there.
    Slots are distinct, but for padding rows, which may share one that no image has. Stale history is harmless while it is finite:
    `board` zeroes it, and an image whose model gives NaN keeps it to itself.
    """
    history_SKCHW[slots_B, WINDOW + cursors_B % WINDOW] = outputs_BCHW.float()
    if noise_BCHW is not None:
        history_SKCHW[slots_B, NOISE_COLUMN] = noise_BCHW.float()
    next_BCHW = _weighted_sum(history_SKCHW[slots_B], coefficients_BK)  # the index makes a copy
    history_SKCHW[slots_B, (cursors_B + 1) % WINDOW] = next_BCHW
    return next_BCHW


def _weighted_sum(history_BKCHW: torch.Tensor, coefficients_BK: torch.Tensor) -> torch.Tensor:
    """Σ_k coefficients[b, k] · history[b, k], as one product and a fixed tree of additions; overwrites `history_BKCHW`.

    A matrix product would be shorter, but its order of summation changes with the batch's size, and on a GPU it may be done in TF32.
    Additions element by element round the same way everywhere.
    """
    terms_BKCHW = history_BKCHW.mul_(coefficients_BK[:, :, None, None, None])
    halves = terms_BKCHW[:, :WINDOW].add_(terms_BKCHW[:, WINDOW:NOISE_COLUMN])
    quarters = halves[:, 0::2].add_(halves[:, 1::2])
    return quarters[:, 0].add_(quarters[:, 1]) + terms_BKCHW[:, NOISE_COLUMN]


def _per_image(values_B: torch.Tensor) -> torch.Tensor:
    """`values_B` shaped to multiply a `[B, C, H, W]`."""
    return values_B[:, None, None, None]
