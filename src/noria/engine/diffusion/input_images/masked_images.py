"""The first samples of images with start images, and the changes that their masks make in each call.

What is not repainted the samples after each call keep, but not those of a model for inpainting: it gets the mask and
what is kept in its input.

Draws of an image follow diffusers' pipelines: one that samples its start image's latents, its noise, and with a mask
one that samples the latents of what is kept, which only models for inpainting use. Of these, UNets draw nothing for the
start image if they begin with noise alone.

Shapes: B images of a step, M of them with a mask, C latent channels, H × W latent size, E elements of C × H × W; of a
mask M is its channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from noria.engine.diffusion.device_transfer import to_host
from noria.engine.diffusion.preparation import PreparedImageRequest
from noria.engine.diffusion.upscaling.second_pass import stretch
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.vae import LatentDistribution
from noria.sampling.noise import NoiseStream
from noria.sampling.step import KeptLatents
from noria.sampling.tables import SamplerTable
from noria.scheduling.types import ItemId, Step


@dataclass(frozen=True, eq=False)
class _MaskedImage:
    """The tensors that a running image with a mask keeps, on the device, or on the host while it is evicted."""

    latents_E: torch.Tensor  # latents of its start image
    noise_E: torch.Tensor
    repainted_E: torch.Tensor  # bool


class MaskedImages:
    """The running images that have a mask, and what they keep of their start images."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self._images: dict[ItemId, _MaskedImage] = {}
        self._on_host: set[ItemId] = set()  # images that were evicted, and have not stepped since
        self._inputs: dict[ItemId, torch.Tensor] = {}  # inputs of a model for inpainting: [M + C, H, W] for each image

    def begin(self, item: ItemId, prepared: PreparedImageRequest, noise: NoiseStream) -> torch.Tensor:
        """Return the first sample of an image that has a start image, [C, H, W] float32.

        Takes the first draws of its `noise`.
        """
        device, table, start = self._model.device, prepared.table, prepared.start
        assert start is not None
        assert table.image_weights is not None
        if self._model.inpainting is not None and start.begins_with_noise:
            first_CHW = table.init_noise_sigma * noise.initial().to(device, torch.float32)
        else:
            latents_CHW = sample_latents(start.encoded, noise, device)
            if latents_CHW.shape != prepared.latent_shape:
                latents_CHW = stretch(latents_CHW, prepared.latent_shape[1:])
            noise_CHW = noise.initial().to(device, torch.float32)
            if (fill := prepared.request.payload.mask_fill) is not None:
                assert start.repainted_MHW is not None
                repainted_1HW = torch.from_numpy(start.repainted_MHW[:1]).to(device)
                content_CHW = noise_CHW if fill == "noise" else torch.zeros_like(latents_CHW)
                latents_CHW = torch.where(repainted_1HW, content_CHW, latents_CHW)
            of_image, of_noise = map(float, table.image_weights[0])
            if start.begins_with_noise:
                of_image, of_noise = 0.0, table.init_noise_sigma
            first_CHW = of_image * latents_CHW + of_noise * noise_CHW
        if start.repainted_MHW is None:
            return first_CHW
        repainted_MHW = torch.from_numpy(start.repainted_MHW).to(device)
        if self._model.inpainting is not None:
            kept_CHW = sample_latents(start.kept, noise, device)
            self._inputs[item] = self._model.inpainting.join(repainted_MHW.float(), kept_CHW)
            return first_CHW
        if start.encoded.deviation_BCHW is not None:
            noise.of_start_image(latents_CHW.dtype)
        self._images[item] = _MaskedImage(
            latents_CHW.flatten(), noise_CHW.flatten(), repainted_MHW.expand(latents_CHW.shape).flatten()
        )
        return first_CHW

    def with_masks(self, steps: Sequence[Step], latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the model: the latents and, of one for inpainting, M + C channels more.

        What the images keep is on the device from then on.
        """
        for item in self._on_host.intersection([step.image for step in steps]) if self._on_host else ():
            self._move(item, lambda tensor: tensor.to(self._model.device, non_blocking=True))
            self._on_host.remove(item)
        if self._model.inpainting is None:
            return latents_BCHW
        return torch.cat([latents_BCHW, torch.stack([self._inputs[step.image] for step in steps])], dim=1)

    def kept(self, steps: Sequence[Step], prepared: Sequence[PreparedImageRequest]) -> KeptLatents | None:
        """Return what the samples after `steps` keep; None if none of their images has a mask."""
        indices = [b for b, step in enumerate(steps) if step.image in self._images] if self._images else []
        if not indices:
            return None
        device, images = self._model.device, [self._images[steps[b].image] for b in indices]
        weights = [_weights_after(prepared[b].table, steps[b].call) for b in indices]
        weights_M2 = torch.from_numpy(np.stack(weights)).to(device, non_blocking=True)
        latents_ME = weights_M2[:, :1] * torch.stack([image.latents_E for image in images])
        latents_ME.addcmul_(weights_M2[:, 1:], torch.stack([image.noise_E for image in images]))
        repainted_ME = torch.stack([image.repainted_E for image in images])
        return KeptLatents(torch.tensor(indices).to(device, non_blocking=True), repainted_ME, latents_ME)

    def to_host(self, item: ItemId) -> None:
        """Move what an image keeps to the host's memory, until it steps again."""
        self._on_host.add(item)
        self._move(item, lambda tensor: to_host(tensor)[0])

    def _move(self, item: ItemId, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if (kept := self._images.get(item)) is not None:
            self._images[item] = _MaskedImage(move(kept.latents_E), move(kept.noise_E), move(kept.repainted_E))
        if (inputs := self._inputs.get(item)) is not None:
            self._inputs[item] = move(inputs)

    def end(self, item: ItemId) -> None:
        """Release what an image keeps, if it keeps anything."""
        self._images.pop(item, None)
        self._inputs.pop(item, None)
        self._on_host.discard(item)


def sample_latents(encoded: LatentDistribution, noise: NoiseStream, device: torch.device) -> torch.Tensor:
    """Return latents [C, H, W] float32 of what a VAE has encoded, by the next draw of `noise` if it needs one."""
    latents_CHW = encoded.mean_BCHW[0]
    if encoded.deviation_BCHW is not None:
        drawn_CHW = noise.of_start_image(latents_CHW.dtype, tuple(latents_CHW.shape)).to(device)
        latents_CHW = latents_CHW + encoded.deviation_BCHW[0] * drawn_CHW
    return latents_CHW.float()


def _weights_after(table: SamplerTable, call: int) -> NDArray[np.float32]:
    """Return the weights of the image and of noise in the sample after a call, [2]."""
    assert table.image_weights is not None, "a sampler that begins with an image"
    weights_2: NDArray[np.float32] = table.image_weights[call + 1]
    return weights_2
