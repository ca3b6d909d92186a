"""The start of a request: the pixels and the mask that it brings, until they are latents.

The frame of data is [height, width, 3] uint8 RGB and, with a mask, [height, width] uint8, of which 128 and more is
repainted; then [height, width, 3] for each control, in the size of each pass, and for each reference, of its own size;
and at last of the image of the IP-Adapter, whose sides are its encoder's.
"""

import math
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from noria.engine.diffusion.input_images.controls import ControlImage
from noria.engine.diffusion.input_images.image_prompts import ImagePrompt
from noria.engine.diffusion.input_images.references import ReferenceImages
from noria.errors import InvalidField, QueueFull
from noria.models.diffusion.diffusion_model import DiffusionModel, InpaintingInput
from noria.models.diffusion.vae import LatentDistribution
from noria.protocol.diffusion import DiffusionPayload, min_strength

MAX_WAITING_BYTES = 2**30
"""Of pixels of accepted requests that wait: 300 images of 1024 × 1024, more than wait by default."""

_RETRY_AFTER_S = 5.0  # an image of the usual 20 to 50 steps takes a few seconds
_REPAINTED = 128  # and more, as diffusers' VaeImageProcessor rounds masks
_GREY = np.float32(127.5)  # 0 in the VAE's scale, as diffusers' pipelines put it where an image is repainted


class StartLatents:
    """The latents of a request's start image, and until they are encoded its pixels."""

    def __init__(
        self,
        pixels_HW3: NDArray[np.uint8],
        repainted_MHW: NDArray[np.bool_] | None,
        mask_HW: NDArray[np.bool_] | None,
        *,
        begins_with_noise: bool,
    ) -> None:
        """`pixels_HW3` and `mask_HW` are of the image's size, `repainted_MHW` of the latents'; True is repainted.

        `mask_HW` is None but for a model for inpainting, which gets the latents of what it keeps; M is 1 but for it.
        """
        self._pixels: tuple[NDArray[np.uint8], NDArray[np.bool_] | None] | None = (pixels_HW3, mask_HW)
        self._encoded: LatentDistribution | None = None
        self._kept: LatentDistribution | None = None
        self.repainted_MHW, self.begins_with_noise = repainted_MHW, begins_with_noise

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the pixels, until they are encoded."""
        return sum(each.nbytes for each in self._pixels or () if each is not None)

    @property
    def encoded(self) -> LatentDistribution:
        """Its latents, with a B of 1, once they are encoded; not of a model for inpainting that begins with noise."""
        assert self._encoded is not None
        return self._encoded

    @property
    def kept(self) -> LatentDistribution:
        """Of a model for inpainting, likewise: the latents of the start image, in grey where it is repainted."""
        assert self._kept is not None
        return self._kept

    @staticmethod
    def encode(starts: "Sequence[StartLatents]", model: DiffusionModel, batch_size: int | None) -> None:
        """Encode start images together, those that are not yet; of other sizes, each size apart.

        With `batch_size`, as many are encoded, the last ones without use, so that no bit depends on how many there are.
        """
        waiting = [(start, start._pixels) for start in starts if start._pixels is not None]
        begun = [
            (start, pixels_HW3)
            for start, (pixels_HW3, mask_HW) in waiting
            if mask_HW is None or not start.begins_with_noise
        ]
        masked = [
            (start, np.where(mask_HW[:, :, None], _GREY, pixels_HW3))
            for start, (pixels_HW3, mask_HW) in waiting
            if mask_HW is not None
        ]
        encoded, kept = (_encode([pixels_HW3 for _, pixels_HW3 in each], model, batch_size) for each in (begun, masked))
        # These come last: what runs out of memory is repeated.
        for (start, _), latents in zip(begun, encoded, strict=True):
            start._encoded = latents
        for (start, _), latents in zip(masked, kept, strict=True):
            start._kept = latents
        for start in starts:
            start._pixels = None


def _encode(
    images: "Sequence[NDArray[np.uint8] | NDArray[np.float32]]", model: DiffusionModel, batch_size: int | None
) -> list[LatentDistribution]:
    """Return the latents of each of `images`, encoded together, with a B of 1."""
    if not images:
        return []
    if any(image.shape != images[0].shape for image in images):
        return [latents for image in images for latents in _encode([image], model, batch_size)]
    padding = 0 if batch_size is None else max(0, batch_size - len(images))
    encoded = model.encode(torch.from_numpy(np.stack([*images, *[images[0]] * padding])))
    return [
        LatentDistribution(
            encoded.mean_BCHW[b : b + 1],
            None if encoded.deviation_BCHW is None else encoded.deviation_BCHW[b : b + 1],
        )
        for b in range(len(images))
    ]


class RequestFrame(NamedTuple):
    """The images of a request."""

    start: StartLatents | None = None
    controls: tuple[tuple[ControlImage, ...], ...] = ()  # for each its image in each pass
    references: ReferenceImages | None = None
    image_prompt: ImagePrompt | None = None


class StartFrameReader:
    """Reads frames of data. Any thread may use it.

    A prepared request holds what is read for it, so nothing has to be returned, whatever ends the request.
    """

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES, inpainting: InpaintingInput | None = None) -> None:
        """`inpainting` is that of the model that they are for."""
        self._max_waiting_bytes, self._inpainting = max_waiting_bytes, inpainting
        self._alive: weakref.WeakSet[StartLatents | ControlImage | ReferenceImages | ImagePrompt] = weakref.WeakSet()
        self._lock = threading.Lock()

    def read(
        self,
        payload: DiffusionPayload,
        data: memoryview | None,
        latent_shape: tuple[int, int, int],
        *,
        is_limited: bool = True,
    ) -> RequestFrame:
        """Return the images of a request, whose own have latents of `latent_shape`.

        Raises:
            InvalidField: the frame, the mask or the strength do not fit together.
            QueueFull: the pixels of requests that wait fill the memory for them, and it `is_limited`.
        """
        if payload.strength is None and payload.has_mask:
            raise InvalidField("a mask needs a start image", field="mask")
        if self._inpainting is not None and not payload.has_mask:
            raise InvalidField("this model is for inpainting, and needs a start image and a mask", field="mask")
        if payload.start_px is not None and payload.has_mask:
            raise InvalidField("the latents of a start image with a mask are not resized", field="mask")
        check_strength(payload)
        num_bytes, expected = len(data or b""), _num_bytes(payload)
        if num_bytes != expected or (data is None) != (expected == 0):
            raise InvalidField(
                f"the data has {num_bytes} bytes, and not the {expected} of {_describe(payload)} of {payload.width} × "
                f"{payload.height} pixels",
                field="data" if payload.strength is None else "image",
            )
        if data is None:
            return RequestFrame()
        frame = np.frombuffer(data, np.uint8)
        image_prompt_at = len(frame) - _num_image_prompt_bytes(payload)
        first_reference = image_prompt_at - payload.num_reference_bytes
        first_control = first_reference - payload.num_control_bytes
        of_start, of_controls, of_references, of_image_prompt = np.split(
            frame, [first_control, first_reference, image_prompt_at]
        )
        with self._lock:
            waiting_bytes = sum(each.waiting_bytes for each in list(self._alive))
            if is_limited and waiting_bytes and waiting_bytes + len(frame) > self._max_waiting_bytes:
                raise QueueFull(
                    f"the images of requests that wait take {waiting_bytes} bytes of {self._max_waiting_bytes}",
                    retry_after_s=_RETRY_AFTER_S,
                )
            # Copies, which do not keep the frame.
            start = self._read_start(payload, of_start, latent_shape) if payload.strength is not None else None
            controls = _read_controls(payload, of_controls)
            references = _read_references(payload, of_references) if payload.reference_images else None
            image_prompt = None
            if (adapter := payload.ip_adapter) is not None:
                image_prompt = ImagePrompt(
                    adapter, of_image_prompt.reshape(adapter.image_px, adapter.image_px, 3).copy()
                )
            of_passes = (image for each in controls for image in each)
            self._alive.update(each for each in (start, *of_passes, references, image_prompt) if each is not None)
        return RequestFrame(start, controls, references, image_prompt)

    def _read_start(
        self, payload: DiffusionPayload, frame: NDArray[np.uint8], latent_shape: tuple[int, int, int]
    ) -> StartLatents:
        num_pixels, inpainting = payload.height * payload.width, self._inpainting
        repainted_MHW = mask_HW = None
        if payload.has_mask:
            mask_HW = frame[3 * num_pixels :].reshape(payload.height, payload.width) >= _REPAINTED
            repainted_MHW = _mask_of_latents(mask_HW, latent_shape, inpainting.mask_channels if inpainting else 1)
        width, height = payload.start_px or (payload.width, payload.height)
        pixels_HW3 = frame[: 3 * width * height].reshape(height, width, 3).copy()
        # The pipelines for inpainting begin with noise alone at strength 1, those without a mask never.
        begins_with_noise = payload.has_mask and payload.strength == 1
        if inpainting is None:
            mask_HW = None
        elif inpainting.always_has_start:
            begins_with_noise = False
        return StartLatents(pixels_HW3, repainted_MHW, mask_HW, begins_with_noise=begins_with_noise)


def _mask_of_latents(
    mask_HW: NDArray[np.bool_], latent_shape: tuple[int, int, int], num_channels: int
) -> NDArray[np.bool_]:
    """Return the first pixels of each latent's block as [M, H, W]; of one, diffusers' resizing takes the top left."""
    _, height, width = latent_shape
    block = mask_HW.shape[0] // height
    pixels_MHW = mask_HW.reshape(height, block, width, block).transpose(1, 3, 0, 2).reshape(-1, height, width)
    return pixels_MHW[:num_channels].copy()


def _num_bytes(payload: DiffusionPayload) -> int:
    """Return how long the frame of a request is."""
    start_px = payload.start_px or (payload.width, payload.height)
    of_start = 0 if payload.strength is None else (3 + payload.has_mask) * math.prod(start_px)
    of_others = payload.num_control_bytes + payload.num_reference_bytes
    return of_start + of_others + _num_image_prompt_bytes(payload)


def _num_image_prompt_bytes(payload: DiffusionPayload) -> int:
    return 0 if payload.ip_adapter is None else 3 * payload.ip_adapter.image_px**2


def _describe(payload: DiffusionPayload) -> str:
    parts = [
        *(["a start image"] if payload.strength is not None else []),
        *(["a mask"] if payload.has_mask else []),
        *(["images of controls: " + str(len(payload.controls))] if payload.controls else []),
        *(["references of " + str(payload.num_reference_pixels) + " pixels"] if payload.reference_images else []),
        *(["the image of an IP-Adapter"] if payload.ip_adapter is not None else []),
    ]
    return " and ".join(parts) or "no image"


def _read_controls(payload: DiffusionPayload, frame: NDArray[np.uint8]) -> tuple[tuple[ControlImage, ...], ...]:
    sizes = payload.sizes_of_passes
    ends = np.cumsum([3 * math.prod(size) for size in sizes])
    return tuple(
        tuple(
            ControlImage(pixels.reshape(height, width, 3).copy())
            for pixels, (width, height) in zip(np.split(of_control, ends[:-1]), sizes, strict=True)
        )
        for of_control in frame.reshape(len(payload.controls), -1 if payload.controls else 0)
    )


def _read_references(payload: DiffusionPayload, frame: NDArray[np.uint8]) -> ReferenceImages:
    ends = np.cumsum([each.num_bytes for each in payload.reference_images])
    shown, read = [], []
    for each, part in zip(payload.reference_images, np.split(frame, ends[:-1]), strict=True):
        of_denoiser, of_prompt = np.split(part, [3 * each.width * each.height])
        shown.append(of_denoiser.reshape(each.height, each.width, 3).copy())
        if len(of_prompt):
            read.append(of_prompt.reshape(each.prompt_height, each.prompt_width, 3).copy())
    return ReferenceImages(shown, read)


def check_strength(payload: DiffusionPayload) -> None:
    """Check the strength of a request, if it has one. Raises `errors.InvalidField`."""
    strength = payload.strength
    if strength is None:
        return
    if not 0 < strength <= 1:
        raise InvalidField(f"strength must be above 0 and at most 1, got {strength}", field="strength")
    if payload.first_step == payload.inference_steps:
        raise InvalidField(
            f"strength {strength} leaves none of {payload.inference_steps} inference_steps; at least "
            f"{min_strength(payload.inference_steps)} leaves one",
            field="strength",
        )
