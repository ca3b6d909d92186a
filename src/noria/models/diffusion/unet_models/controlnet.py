"""The ControlNets of a loaded model: what they add to a call of its UNet, on the rows that want it.

A ControlNet sees the rows' latents (of a model for inpainting these alone), time and prompt, and an image; its
residuals are added to the UNet's skip connections and middle. Rows that it does not steer get zeros, and it is not
called for them. Of several, the residuals are summed.

Shapes: R rows of a call, N of them steered by one ControlNet, C latent channels, H × W latent size.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.adapters.controlnet_folders import ControlNetFolders
from noria.models.diffusion.block_compilation import check_not_compiled
from noria.models.diffusion.conditioning import ConditioningRows
from noria.models.diffusion.folders.unet_models.controlnet_folder import STEM, ControlNetFolder
from noria.models.diffusion.part_loading import DTYPES, SharedParts, load_weights
from noria.models.diffusion.unet_models.unet import configure, memory_format
from noria.protocol.diffusion import DiffusionModelSpec


@dataclass(frozen=True, eq=False)
class ControlRows:
    """The rows of a call that one ControlNet steers; those after the first `num_rows` are padding."""

    name: str
    positions_N: torch.Tensor  # in the call
    images_N3hw: torch.Tensor  # control images in the images' size; 0 to 1
    scales_N: torch.Tensor  # float32
    num_rows: int


class ControlNets:
    """The loaded ControlNets of one model, by name."""

    def __init__(self, parts: Mapping[str, Any], digests: Mapping[str, str], config: EngineConfig) -> None:
        """`parts` have the device and dtype of the model's UNet, `digests` are those of their folders."""
        self._parts, self.digests, self._memory_format = parts, digests, memory_format(config)

    def residuals(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        controls: Sequence[ControlRows],
        added: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return arguments for the UNet: of no rows none. `added` are [R, …] of what SDXL is conditioned on besides."""
        sums: list[torch.Tensor] = []
        for rows, length in _by_length(controls, conditioning):
            part, at = self._parts[rows.name], rows.positions_N
            down, middle = part(
                latents_RCHW[at, : part.config.in_channels]
                .to(part.dtype)
                .contiguous(memory_format=self._memory_format),
                timesteps_R[at],
                **{name: tokens[at, :length] for name, tokens in conditioning.tokens.items()},
                controlnet_cond=rows.images_N3hw.to(part.dtype),
                conditioning_scale=rows.scales_N[:, None, None, None],
                added_cond_kwargs=None if added is None else {name: tensor[at] for name, tensor in added.items()},
                return_dict=False,
            )
            residuals = [*down, middle]
            if not sums:
                sums = [each.new_zeros(len(latents_RCHW), *each.shape[1:], dtype=part.dtype) for each in residuals]
            for of_all, residual in zip(sums, residuals, strict=True):
                of_all.index_add_(0, at[: rows.num_rows], residual[: rows.num_rows].to(part.dtype))
        if not sums:
            return {}
        return {"down_block_additional_residuals": tuple(sums[:-1]), "mid_block_additional_residual": sums[-1]}


def _by_length(
    controls: Sequence[ControlRows], conditioning: ConditioningRows
) -> Iterator[tuple[ControlRows, int | None]]:
    """Yield the rows of each call of a ControlNet, and their number of tokens; None: all.

    It takes no mask, so that a call has rows of one number of tokens.
    """
    for rows in controls:
        if conditioning.mask_RT is None:
            yield rows, None
            continue
        positions = rows.positions_N[: rows.num_rows].tolist()
        lengths = [conditioning.lengths[position] for position in positions]
        for length in sorted({*lengths}):
            chosen = [k for k, each in enumerate(lengths) if each == length]
            at = rows.positions_N[chosen], rows.images_N3hw[chosen], rows.scales_N[chosen]
            yield ControlRows(rows.name, *at, len(chosen)), length


_loaded: SharedParts[Any] = SharedParts()


def load_controlnets(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> ControlNets:
    """Load the ControlNets of `engine.controlnets` that fit a model; onto "meta" without weights.

    Raises:
        ConfigError: the model is compiled, which leaves it no such inputs.
        ModelError: a folder is damaged, or its weights do not match its configuration.
    """
    from diffusers import ControlNetModel

    folders = ControlNetFolders.of(config).for_model(spec)
    if folders:
        check_not_compiled(config, "controlnets")

    def load(folder: ControlNetFolder) -> Any:
        part = load_weights(ControlNetModel, folder.path, STEM, DTYPES[config.dtype], device)
        configure(part, config)
        return part

    parts = {
        name: _loaded.get(_key(folder, config, device), functools.partial(load, folder))
        for name, folder in folders.items()
    }
    return ControlNets(parts, {name: folder.digest for name, folder in folders.items()}, config)


def loaded_controlnets(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> set[str]:
    """Return the names of a model's ControlNets that other models of this process hold, and that it would share."""
    folders = ControlNetFolders.of(config).for_model(spec)
    return {name for name, folder in folders.items() if _key(folder, config, device) in _loaded}


def _key(folder: ControlNetFolder, config: EngineConfig, device: str) -> tuple[object, ...]:
    return folder.path, config.dtype, config.attention, config.channels_last, device
