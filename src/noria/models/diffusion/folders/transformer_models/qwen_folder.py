"""The common part of the folders of Qwen-Image and of Krea 2: the text encoder, one of Qwen's, and the VAE."""

from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, PipelineFolder, Sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH, LanguageModelConfig
from noria.models.files.weights import REDOWNLOAD_HINT

SYSTEM_PROMPT = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
"""The text before a prompt, by the pipelines themselves. A folder's own template is a program, and is not run."""

EDIT_SYSTEM_PROMPT = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
"""The same by the pipeline that edits images."""

END_OF_CHAT = "<|im_end|>\n<|im_start|>assistant\n"
"""The text after a prompt."""

NUM_SYSTEM_TOKENS = 34
"""The number of tokens of `SYSTEM_PROMPT`; their outputs are dropped, whatever the tokenizer."""

NUM_EDIT_SYSTEM_TOKENS = 64
"""The number of tokens of `EDIT_SYSTEM_PROMPT`, whose outputs are dropped likewise."""

MAX_PROMPT_TOKENS = 512
"""Longer prompts are cut, as by diffusers; the words around them that are not dropped are counted."""

Levels = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8)]
"""Factors of the number of channels of a VAE's levels."""

Numbers = Annotated[tuple[float, ...], Meta(min_length=1, max_length=256)]
"""A number for each channel of a VAE's latents."""

_DEFAULT_LATENTS = 128  # latents a side, diffusers' default; Qwen-Image was trained at about 1.3 to 1.7 million pixels
_NUM_PUBLISHED_CHANNELS = 16  # channels of which diffusers' default has means and deviations


class QwenVaeConfig(PartConfig, frozen=True):
    """The settings of an AutoencoderKLQwenImage that decide its sizes; defaults are diffusers'."""

    z_dim: Count = _NUM_PUBLISHED_CHANNELS
    base_dim: Count = 96
    dim_mult: Levels = (1, 2, 4, 4)
    temperal_downsample: Annotated[tuple[bool, ...], Meta(max_length=8)] = (False, True, True)
    input_channels: Literal[3] = 3
    latents_mean: Numbers = (0.0,) * _NUM_PUBLISHED_CHANNELS
    latents_std: Numbers = (1.0,) * _NUM_PUBLISHED_CHANNELS

    @property
    def factor(self) -> int:
        """Pixels per latent along one side."""
        return int(2 ** len(self.temperal_downsample))

    @property
    def decoder_width(self) -> int:
        """Channels of the decoder's first layer."""
        return self.base_dim * self.dim_mult[-1]


QwenVaeT = TypeVar("QwenVaeT", bound=QwenVaeConfig)


class QwenTextConfig(LanguageModelConfig, frozen=True):
    """The settings for texts of a Qwen that reads images, too."""

    max_position_embeddings: Annotated[int, Meta(ge=NUM_SYSTEM_TOKENS + MAX_PROMPT_TOKENS)] = 32768


def qwen_sides(vae: QwenVaeConfig) -> Sides:
    """Return the sides of images."""
    side_px, multiple_px = _DEFAULT_LATENTS * vae.factor, PATCH * vae.factor
    return Sides(side_px, side_px, 4 * multiple_px, 2 * side_px, multiple_px)


def read_qwen_vae(folder: PipelineFolder, kind: type[QwenVaeT]) -> QwenVaeT:
    """Return the VAE's settings. Raises ModelError if it is of another class, or they do not fit each other."""
    file, vae = folder.config_file("vae"), folder.read_part("vae", kind)
    for name, got, wanted, whose in (
        ("temperal_downsample", len(vae.temperal_downsample), len(vae.dim_mult) - 1, "one less than dim_mult"),
        ("latents_mean", len(vae.latents_mean), vae.z_dim, "z_dim"),
        ("latents_std", len(vae.latents_std), vae.z_dim, "z_dim"),
    ):
        if got != wanted:
            raise ModelError(f"{file}: {name} has {got} entries; expected are {wanted}, {whose}. {REDOWNLOAD_HINT}")
    if not all(vae.latents_std):
        raise ModelError(f"{file}: latents_std has a zero, by which latents would be divided. {REDOWNLOAD_HINT}")
    decoder = {"base_dim × dim_mult": (0, vae.decoder_width), "z_dim": (1, vae.z_dim)}
    folder.check_layer("vae", ("decoder.conv_in.weight",), decoder)
    return vae
