"""Checks and describes a folder of a ControlNet, as diffusers saves a ControlNetModel, and says which UNets it fits."""

import pathlib
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from noria.errors import ModelError, short_repr
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, VaeConfig, check_chooses_no_code
from noria.models.files.weights import num_tensor_parameters, read_struct, read_text, read_weights, weights_digest
from noria.protocol.diffusion import DiffusionModelSpec

STEM = "diffusion_pytorch_model"
"""The name of its weight files, without variant, shard and ".safetensors"."""

_Counts = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8)]


class _DownPath(PartConfig, frozen=True):
    """The settings in which a ControlNet and the first half of its UNet agree; defaults are diffusers' for both."""

    in_channels: Count = 4
    block_out_channels: _Counts = (320, 640, 1280, 1280)
    layers_per_block: Count | _Counts = 2
    cross_attention_dim: Count | _Counts = 1280
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None

    def settings(self) -> dict[str, object]:
        """Return what must be equal, by name, in one form."""
        found = {name: getattr(self, name) for name in _DownPath.__struct_fields__ if name != "class_name"}
        if isinstance(self.layers_per_block, int):
            found["layers_per_block"] = (self.layers_per_block,) * len(self.block_out_channels)
        return found


class _Config(_DownPath, frozen=True):
    """The settings of a ControlNet that decide whether it is supported."""

    conditioning_channels: Count = 3
    conditioning_embedding_out_channels: _Counts = (16, 32, 96, 256)
    controlnet_conditioning_channel_order: Literal["rgb", "bgr"] = "rgb"
    global_pool_conditions: bool = False
    class_embed_type: str | None = None
    num_class_embeds: int | None = None
    encoder_hid_dim: int | None = None
    encoder_hid_dim_type: str | None = None


@dataclass(frozen=True)
class ControlNetFolder:
    """A checked folder."""

    path: pathlib.Path
    digest: str  # 12 digits of a SHA-256: of its configuration, and of its weights as a model's fingerprint
    num_parameters: int
    config: _Config


def inspect(folder: pathlib.Path) -> ControlNetFolder:
    """Check a folder and return what is in it.

    Raises ModelError: it is no ControlNet, a file is damaged, or it needs what is not supported.
    """
    file = folder / "config.json"
    check_chooses_no_code(file)
    config = read_struct(file, _Config)
    if config.class_name != "ControlNetModel":
        raise ModelError(f"{file}: _class_name is {short_repr(config.class_name)}; supported is ControlNetModel.")
    if config.conditioning_channels != 3:
        raise ModelError(f"{file}: conditioning_channels is {config.conditioning_channels}; images have 3.")
    for key in ("global_pool_conditions", "class_embed_type", "num_class_embeds", "encoder_hid_dim"):
        if getattr(config, key):
            raise ModelError(
                f"{file}: {key} is {short_repr(getattr(config, key))}, which is not supported; a ControlNet is given "
                "the prompt and an image of its own, whose residuals keep their place."
            )
    if config.encoder_hid_dim_type:
        raise ModelError(
            f"{file}: encoder_hid_dim_type is {short_repr(config.encoder_hid_dim_type)}; supported is none."
        )
    if config.addition_embed_type not in (None, "text_time"):
        raise ModelError(
            f"{file}: addition_embed_type is {short_repr(config.addition_embed_type)}; supported are none "
            "and, of SDXL, text_time."
        )
    num_parameters = num_tensor_parameters(read_weights(folder, "", STEM))
    return ControlNetFolder(folder, weights_digest(folder, STEM, read_text(file)), num_parameters, config)


def misfit(controlnet: ControlNetFolder, spec: DiffusionModelSpec) -> str | None:
    """Return why a ControlNet does not fit a model, with the values of both; None if it does.

    Raises ModelError: the model's folder is damaged.
    """
    unet_file = spec.path / "unet" / "config.json"
    if not unet_file.exists():
        return f"{spec.name} has no UNet"
    theirs, ours = read_struct(unet_file, _DownPath).settings(), controlnet.config.settings()
    vae = read_struct(spec.path / "vae" / "config.json", VaeConfig)
    factor = 2 ** (len(controlnet.config.conditioning_embedding_out_channels) - 1)
    ours |= {"pixels per latent": factor}
    # A ControlNet for a UNet for inpainting takes the latents alone.
    theirs |= {"pixels per latent": vae.factor, "in_channels": vae.latent_channels}
    different = [
        f"{name} {ours[name]} where {spec.name} has {theirs[name]}" for name in ours if ours[name] != theirs[name]
    ]
    return f"it has {', '.join(different)}" if different else None
