"""Calls of the model for images, with their guidance applied.

A call has a row for each image's prompt and, before all these, one for the negative prompt of each guided image. Of
prompts that are joined, all but the first come last.

Shapes: B images of one size, R rows of a call.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from noria.engine.diffusion.device_transfer import to_device
from noria.engine.diffusion.input_images.controls import ActiveControl
from noria.engine.diffusion.loras.lora_cache import Adapters
from noria.engine.diffusion.loras.model_loras import ModelLoras
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, ReferenceTokens, collate
from noria.models.diffusion.diffusion_model import (
    ControlledModel,
    Denoiser,
    ImagePromptedModel,
    LatentRows,
    ReferencedModel,
)
from noria.models.diffusion.ip_adapter import ImageTokens
from noria.models.diffusion.unet_models.controlnet import ControlRows


class CollatedRows:
    """The rows of the last model call, which are kept while the batch has the same prompts in the same order."""

    def __init__(self) -> None:
        self._rows: list[Conditioning] = []
        self._collated: ConditioningRows | None = None

    def get(self, rows: list[Conditioning]) -> ConditioningRows:
        """Return `rows` as one batch."""
        is_same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if self._collated is None or not is_same:
            self._rows, self._collated = [], None  # freed before the next ones need memory
            self._collated, self._rows = collate(rows), rows
        return self._collated


@dataclass(frozen=True, slots=True)
class GuidedImage:
    """The inputs of a call for an image, besides its latents and the time."""

    prompts: tuple[Conditioning, ...]  # several only of a guided image
    weights: tuple[float, ...]  # one for each prompt, which count if they are several
    negative: Conditioning | None  # None: not guided
    scale: float
    adapters: Adapters
    references: ReferenceTokens | None = None
    image_tokens: ImageTokens | None = None  # tokens of its IP-Adapter

    @property
    def num_cut(self) -> int:
        """The tokens at the ends of its prompts that the model is not shown."""
        of_prompts = sum(each.num_cut for each in self.prompts)
        return of_prompts + (0 if self.negative is None else self.negative.num_cut)


class GuidedCalls:
    """Calls one denoiser; rows are padded to the next of `buckets`, above the largest not at all."""

    def __init__(self, model: Denoiser, loras: ModelLoras | None, buckets: Sequence[int]) -> None:
        """Without `loras`, adapters of images have no effect on the calls."""
        self._model, self._loras, self._buckets = model, loras, sorted(buckets)
        self._rows, self._to_device = CollatedRows(), functools.partial(to_device, device=model.device)

    def predict(
        self,
        inputs: Sequence[torch.Tensor],
        timesteps: np.ndarray,
        images: Sequence[GuidedImage],
        controls: Sequence[Sequence[ActiveControl]],
    ) -> list[torch.Tensor]:
        """Make one call; return the outputs [B, C, H, W] float32 of each of `inputs`.

        `inputs` are [B, C, H, W] for each size, with more channels for a model for inpainting; more than one only for a
        model whose calls mix sizes. `timesteps`, `images` and `controls` are those of all inputs, in order.
        """
        guided = [b for b, image in enumerate(images) if image.negative is not None]
        others = [b for b, image in enumerate(images) for _ in image.prompts[1:]]
        positions = guided + list(range(len(images))) + others
        predict, control_rows = self._model.predict, self._control_rows(positions, controls)
        if control_rows:
            assert isinstance(self._model, ControlledModel)
            predict = functools.partial(self._model.predict, controls=control_rows)
        rows = [each.negative for each in images if each.negative is not None] + [each.prompts[0] for each in images]
        rows += [other for each in images for other in each.prompts[1:]]
        padding = self._bucket(len(rows)) - len(rows)
        positions, rows = positions + positions[:1] * padding, rows + rows[:1] * padding
        if any(image.references is not None for image in images):
            assert isinstance(self._model, ReferencedModel)
            predict = functools.partial(self._model.predict, references=[images[b].references for b in positions])
        positions_R = self._to_device(positions)
        scales = np.array([image.scale for image in images], np.float32)
        adapters = [images[b].adapters for b in positions]
        with (
            self._loras.denoising(adapters) if self._loras else contextlib.nullcontext(),
            self._prompted_by_images(positions, len(guided), images),
        ):
            outputs_R = predict(
                inputs[0][positions_R] if len(inputs) == 1 else _rows_at(positions, inputs),
                self._to_device(timesteps)[positions_R],
                self._rows.get(rows),
                self._to_device(scales)[positions_R] if self._model.guidance.embedded else None,
            )
        return self._guide(inputs, images, outputs_R.float() if isinstance(outputs_R, torch.Tensor) else outputs_R)

    def _prompted_by_images(
        self, positions: Sequence[int], num_negative: int, images: Sequence[GuidedImage]
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call with the images at `positions`, of which the first rows are negative."""
        if not isinstance(self._model, ImagePromptedModel) or not self._model.ip_adapters.by_name:
            return contextlib.nullcontext()
        tokens = [images[b].image_tokens for b in positions]
        return self._model.ip_adapters.applied(
            [each and (each.negative if row < num_negative else each.positive) for row, each in enumerate(tokens)]
        )

    def _guide(
        self, inputs: Sequence[torch.Tensor], images: Sequence[GuidedImage], outputs_R: LatentRows
    ) -> list[torch.Tensor]:
        """Return the guided outputs of each of `inputs`, of the rows of `predict`."""
        guided = [b for b, image in enumerate(images) if image.negative is not None]
        negative_rows = {b: row for row, b in enumerate(guided)}
        others = [b for b, image in enumerate(images) for _ in image.prompts[1:]]
        other_rows = list(enumerate(others, len(guided) + len(images)))
        scales = np.array([image.scale for image in images], np.float32)
        combined, start = [], 0
        for inputs_BCHW in inputs:
            of_size = range(start, start + inputs_BCHW.shape[0])
            start = of_size.stop
            prompted = _stacked(outputs_R[len(guided) + of_size.start : len(guided) + of_size.stop])
            if not any(b in negative_rows for b in of_size):
                combined.append(prompted)
                continue
            # An image that is not guided is combined with itself.
            uncond_rows = [negative_rows.get(b, len(guided) + b) for b in of_size]
            uncond = (
                outputs_R[self._to_device(uncond_rows)]
                if isinstance(outputs_R, torch.Tensor)
                else _stacked([outputs_R[row] for row in uncond_rows])
            )
            if any(b in of_size for b in others):
                joined = [[outputs_R[row] for row, other in other_rows if other == b] for b in of_size]
                prompted = torch.stack(
                    [
                        _join(uncond_CHW, [cond_CHW, *rest], images[b].weights) if rest else cond_CHW
                        for b, uncond_CHW, cond_CHW, rest in zip(of_size, uncond, prompted, joined, strict=True)
                    ]
                )
            # Joined prompts are combined at any scale; below the least that guides there is no guidance.
            unguided = np.float32(self._model.guidance.active_above)
            is_guided = [b in negative_rows for b in of_size]
            scales_B = np.where(is_guided, np.maximum(scales[of_size.start : of_size.stop], unguided), unguided)
            combined.append(self._combine(prompted, uncond, self._to_device(scales_B)))
        return combined

    def _combine(self, cond_BCHW: torch.Tensor, uncond_BCHW: torch.Tensor, scale_B: torch.Tensor) -> torch.Tensor:
        """Return the guided outputs; with one bucket, of so many images, since norms of fewer may round otherwise."""
        num_images = len(cond_BCHW)
        if len(self._buckets) == 1 and num_images < self._buckets[0]:
            at = self._to_device([*range(num_images)] + [0] * (self._buckets[0] - num_images))
            cond_BCHW, uncond_BCHW, scale_B = cond_BCHW[at], uncond_BCHW[at], scale_B[at]
        return self._model.guidance.combine(cond_BCHW, uncond_BCHW, scale_B)[:num_images]

    def _control_rows(self, positions: Sequence[int], controls: Sequence[Sequence[ActiveControl]]) -> list[ControlRows]:
        """Return the rows that each ControlNet steers, of a call with the images at `positions`."""
        steered: dict[str, list[tuple[int, ActiveControl]]] = {}
        for row, b in enumerate(positions):
            for control in controls[b]:
                steered.setdefault(control.name, []).append((row, control))
        found = []
        for name, rows in sorted(steered.items()):  # in one order, so that their sum is the same in any batch
            padded = rows + rows[:1] * (self._bucket(len(rows)) - len(rows))
            scales = np.array([control.scale for _, control in padded], np.float32)
            images_N3hw = torch.stack([control.image_3HW for _, control in padded])
            at = self._to_device([row for row, _ in padded])
            found.append(ControlRows(name, at, images_N3hw, self._to_device(scales), len(rows)))
        return found

    def _bucket(self, num_rows: int) -> int:
        return next((bucket for bucket in self._buckets if bucket >= num_rows), num_rows)


def _join(uncond_CHW: torch.Tensor, outputs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return what joined prompts have in place of the output c of one: u + Σ w·(c - u).

    Guided by g it becomes u + Σ w·g·(c - u), as in Liu et al. (2022), eq. 11.
    """
    joined_CHW = uncond_CHW.float()
    for output_CHW, weight in zip(outputs, weights, strict=True):
        joined_CHW = joined_CHW + weight * (output_CHW.float() - uncond_CHW.float())
    return joined_CHW


def _rows_at(positions: Sequence[int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the [C, H, W] of images of several sizes, which are numbered through all inputs."""
    each = [image_CHW for inputs_BCHW in inputs for image_CHW in inputs_BCHW]
    return [each[b] for b in positions]


def _stacked(rows: LatentRows) -> torch.Tensor:
    """Return rows of one size as [R, C, H, W] float32."""
    return rows if isinstance(rows, torch.Tensor) else torch.stack(rows).float()
