"""The ControlNets that steer a request's images: the image of each, and its scale in every call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from noria.errors import ControlNetNotFound, InvalidField, short_list, short_repr
from noria.models.adapters.controlnet_folders import NO_CONTROLNETS
from noria.models.diffusion.diffusion_model import ControlledModel, DiffusionModel
from noria.protocol.diffusion import Control


class ControlImage:
    """The image of a control: its pixels, and from the first call on a tensor on the device."""

    def __init__(self, pixels_HW3: NDArray[np.uint8]) -> None:
        self._pixels_HW3: NDArray[np.uint8] | None = pixels_HW3
        self._on_device: torch.Tensor | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the pixels, until they are on the device."""
        pixels_HW3 = self._pixels_HW3
        return 0 if pixels_HW3 is None else pixels_HW3.nbytes

    def on_device(self, model: DiffusionModel) -> torch.Tensor:
        """Return [3, height, width] in the model's dtype, 0 to 1."""
        if self._on_device is None:
            assert self._pixels_HW3 is not None
            pixels_3HW = torch.from_numpy(self._pixels_HW3).to(model.device).permute(2, 0, 1)
            self._on_device = (pixels_3HW.float() / 255).to(model.dtype).contiguous()
            self._pixels_HW3 = None
        return self._on_device


class ActiveControl(NamedTuple):
    """A ControlNet that steers an image in one call."""

    name: str
    scale: float
    image_3HW: torch.Tensor


@dataclass(frozen=True, eq=False)
class PreparedControl:
    """A control of a request."""

    name: str
    scales: NDArray[np.float32]  # the scale in each call; 0: it does not steer that one
    images: tuple[ControlImage, ...]  # its image in each pass


def prepare_controls(
    controls: Sequence[Control],
    images: Sequence[tuple[ControlImage, ...]],
    num_calls: Sequence[int],
    model: DiffusionModel,
    model_name: str,
) -> tuple[PreparedControl, ...]:
    """Return the controls of a request: start and end are parts of the calls of each pass.

    `num_calls` are those of the first pass, between both, which are not the model's, and of the second one.

    Raises:
        ControlNetNotFound: the model has none of this name loaded.
        InvalidField: one is of another digest.
    """
    loaded = model.controlnets.digests if controls and isinstance(model, ControlledModel) else {}
    for control in controls:
        if control.name not in loaded:
            raise ControlNetNotFound(
                f"controls: {model_name} has no ControlNet {short_repr(control.name)} loaded; "
                + (f"allowed are {short_list(map(short_repr, loaded), 50)}." if loaded else f"{NO_CONTROLNETS}."),
                field="controls",
            )
        if control.digest not in (None, loaded[control.name]):
            raise InvalidField(
                f"controls: {short_repr(control.name)} has digest {short_repr(control.digest)} on disk, but "
                f"{loaded[control.name]} is loaded. Restart the server to use the new files.",
                field="controls",
            )
    return tuple(
        PreparedControl(control.name, np.concatenate([call_scales(control, each) for each in num_calls]), of_passes)
        for control, of_passes in zip(controls, images, strict=True)
    )


def call_scales(control: Control, num_calls: int) -> NDArray[np.float32]:
    """Return the scale in each call, as diffusers' pipelines compute it from start and end (`controlnet_keep`)."""
    is_kept = [
        not (call / num_calls < control.start or (call + 1) / num_calls > control.end) for call in range(num_calls)
    ]
    return np.where(is_kept, np.float32(control.scale), np.float32(0))


def active_controls(
    controls: Sequence[PreparedControl], call: int, pass_number: int, model: DiffusionModel
) -> list[ActiveControl]:
    """Return those that steer a call of a pass, 0 or 1."""
    return [
        ActiveControl(each.name, float(each.scales[call]), each.images[pass_number].on_device(model))
        for each in controls
        if each.scales[call]
    ]
