"""Says by the header of a single file which model it has: family, what it predicts, precision, the parts within.

Besides the header one small tensor is read, and MODEL.yaml and MODEL.noria.json beside the file. What no name of a
tensor tells, trainers write into the metadata (https://github.com/Stability-AI/ModelSpec) or as empty tensors
(`v_pred`, `ztsnr`).
"""

import json
import pathlib
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from noria.errors import ModelError, short_repr
from noria.models.diffusion.folders.pipeline_folder import OverridesT
from noria.models.diffusion.folders.unet_models.unet_folder import UnetOverrides
from noria.models.diffusion.single_file.checkpoint_header import (
    CheckpointHeader,
    StoredTensor,
    read_checkpoint_header,
)
from noria.models.diffusion.single_file.known_files import describe_other_file
from noria.models.diffusion.single_file.part_configs import LATENT_CHANNELS, SETTINGS, FamilySettings
from noria.models.diffusion.single_file.stored_numbers import FLOATS, SCALES, read_floats
from noria.models.files.weights import read_struct, read_text

UNET = "model.diffusion_model."
VAE = ("first_stage_model.", "vae.")
_FIRST_CONVOLUTION = f"{UNET}input_blocks.0.0.weight"
_INPAINTING_CHANNELS = 9
_V_NORM = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
_V_NORM_STD = 0.09  # Stable Diffusion 2 is above with v, below without; ComfyUI divides here, too
_YAML_V = re.compile(rb"^[ \t]*parameterization:[ \t]*[\"']?v[\"']?[ \t\r]*$", re.MULTILINE)
_MAX_YAML_BYTES = 65_536

TEXT_ENCODERS = {
    "sd1": {"text_encoder": "cond_stage_model.transformer."},
    "sd2": {"text_encoder": "cond_stage_model.model."},
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "refiner": {"text_encoder_2": "conditioner.embedders.0.model."},
}
"""The prefix of each text encoder's tensors, by family and by the part that it becomes."""

_OTHER_INPUTS = {
    5: "a depth model",
    7: "a model for upscaling",
    8: "a model for editing (InstructPix2Pix)",
}
_EDM = {
    "edm_vpred.sigma_max": "CosXL",
    "edm_mean": "Playground 2.5",
}


@dataclass(frozen=True)
class Checkpoint:
    """A file that can be converted, if a VAE is in it or beside it."""

    header: CheckpointHeader
    family: str  # a key of `SETTINGS`
    predicts_v: bool
    has_zero_snr: bool
    side_px: int  # side of the images that it was trained with
    overrides: bytes = b""  # what the noria.json of its folder has

    @property
    def settings(self) -> FamilySettings:
        """The settings of its family."""
        return SETTINGS[self.family]

    @property
    def is_for_inpainting(self) -> bool:
        """Whether each image needs a mask."""
        return self.header.tensors[_FIRST_CONVOLUTION].shape[1] == _INPAINTING_CHANNELS

    @cached_property
    def vae_prefix(self) -> str | None:
        """The prefix of its VAE's tensors; None: it has no VAE."""
        return next((prefix for prefix in VAE if f"{prefix}decoder.conv_in.weight" in self.header.tensors), None)

    @property
    def is_scaled(self) -> bool:
        """Whether it has numbers in float8 with scales."""
        return any(name.endswith(SCALES) for name in self.header.tensors)

    def describe(self) -> str:
        """Return what it is, in words."""
        unet = self.header.starting(UNET).values()
        dtypes = sorted({FLOATS[tensor.dtype] for tensor in unet if tensor.dtype in FLOATS and len(tensor.shape) > 1})
        words = [self.settings.title + (" for inpainting" if self.is_for_inpainting else "")]
        words.append(f"{' and '.join(dtypes)}{' with scales' if self.is_scaled else ''}")
        words.append(f"predicts {'v' if self.predicts_v else 'the noise'}")
        words += ["zero terminal SNR"] if self.has_zero_snr else []
        words.append(f"trained at {self.side_px} px")
        words += [] if self.vae_prefix or self.family == "refiner" else ["without a VAE"]
        clip_skip = _clip_skip(self.header, self.family)
        words += [] if clip_skip is None else [f"made for clip skip {clip_skip}"]
        return ", ".join(words)


def read_checkpoint(file: pathlib.Path) -> Checkpoint:
    """Return what a file is.

    Raises ModelError: it is damaged, or no checkpoint of a family that is converted, or its noria.json is not valid.
    """
    return checkpoint_of(read_checkpoint_header(file))


def checkpoint_of(header: CheckpointHeader) -> Checkpoint:
    """Return what the file with this header is. Raises as `read_checkpoint`, of which it is the part behind reading."""
    file, tensors = header.file, header.tensors
    first = tensors.get(_FIRST_CONVOLUTION)
    if first is None or len(first.shape) != 4:
        raise ModelError(f"{file} {describe_other_file(tensors)}")
    if other := next((name for key, name in _EDM.items() if key in tensors), None):
        raise ModelError(f"{file}: has the noise schedule EDM, as {other}, which is not served.")
    if (channels := first.shape[1]) not in (LATENT_CHANNELS, _INPAINTING_CHANNELS):
        what = _OTHER_INPUTS.get(channels, "another model")
        raise ModelError(
            f"{file}: its UNet takes {channels} channels: {what}, which is not served. Served are models with "
            f"{LATENT_CHANNELS} and, for inpainting, {_INPAINTING_CHANNELS}."
        )
    _check_dtypes(header)
    family = _family(header)
    predicts_v = "v_pred" in tensors or _says_v(header, family)
    has_zero_snr = "ztsnr" in tensors
    default = 768 if family == "sd2" and predicts_v else SETTINGS[family].default_side_px
    return Checkpoint(header, family, predicts_v, has_zero_snr, _side_px(header) or default, _overrides(header, family))


def _overrides(header: CheckpointHeader, family: str) -> bytes:
    """Return the noria.json of a file, with the clip skip that the metadata says unless it has one; b"": none."""
    text, given = read_beside(header.file, UnetOverrides)
    clip_skip = _clip_skip(header, family)
    if clip_skip is None or given.default_clip_skip is not None:
        return text
    return json.dumps(json.loads(text or "{}") | {"default_clip_skip": clip_skip}).encode()


def read_beside(file: pathlib.Path, kind: type[OverridesT]) -> tuple[bytes, OverridesT]:
    """Return the MODEL.noria.json beside a file, as text and as what it says; b"": there is none. Raises ModelError."""
    beside = file.with_suffix(".noria.json")
    text = read_text(beside) if beside.exists() else b""
    return text, read_struct(beside, kind) if text else kind()


def _clip_skip(header: CheckpointHeader, family: str) -> int | None:
    """Return the layer of the text encoder that Stable Diffusion 1 is made for, unless it is the last one."""
    said = header.metadata.get("modelspec.encoder_layer", "")
    if family != "sd1" or not re.fullmatch(r"[1-9]\d?", said, re.ASCII):
        return None
    names = header.starting(TEXT_ENCODERS[family]["text_encoder"])
    return int(said) if 1 < int(said) <= sum(name.endswith(".layer_norm1.weight") for name in names) else None


def _family(header: CheckpointHeader) -> str:
    """Return the family whose text encoders the file has."""
    names = header.tensors
    if any(name.startswith("embedder.model.visual.") for name in names):
        raise ModelError(f"{header.file}: takes images as prompts (unCLIP), which is not served.")
    for family in ("sdxl", "refiner", "sd2", "sd1"):
        prefixes = TEXT_ENCODERS[family].values()
        if all(any(name.startswith(prefix) for name in names) for prefix in prefixes):
            return family
    first, *others = (" and ".join(prefixes.values()) for prefixes in TEXT_ENCODERS.values())
    raise ModelError(
        f"{header.file}: has a UNet, but not the text encoders, whose tensors would start with {first}, or with "
        f"{', or '.join(others)}. Take a checkpoint with all parts."
    )


def _check_dtypes(header: CheckpointHeader) -> None:
    """Raise ModelError if a layer of the UNet is quantized otherwise than to float8."""
    for name, tensor in header.tensors.items():
        if name.startswith(UNET) and name.endswith(".weight") and tensor.dtype not in FLOATS:
            raise ModelError(
                f"{header.file}: {short_repr(name)} is quantized to {tensor.dtype}; read are {', '.join(FLOATS)}. Take "
                "the checkpoint in 16 bits."
            )


def _says_v(header: CheckpointHeader, family: str) -> bool:
    """Whether the metadata, a YAML file beside it, or, of Stable Diffusion 2, the weights say that it predicts v."""
    said = header.metadata.get("modelspec.prediction_type", "")
    if said in ("v", "v_prediction", "epsilon"):
        return said != "epsilon"
    if header.metadata.get("modelspec.architecture", "").endswith("-v"):  # stable-diffusion-v2-768-v
        return True
    yaml = header.file.with_suffix(".yaml")
    if yaml.is_file() and yaml.stat().st_size <= _MAX_YAML_BYTES:
        return bool(_YAML_V.search(read_text(yaml)))
    norm = header.tensors.get(_V_NORM)
    return family == "sd2" and _is_short(norm) and bool(np.std(read_floats(header.file, norm)) > _V_NORM_STD)


def _is_short(tensor: StoredTensor | None) -> bool:
    return tensor is not None and len(tensor.shape) == 1 and 0 < tensor.shape[0] <= 10_000 and tensor.dtype in FLOATS


def _side_px(header: CheckpointHeader) -> int | None:
    """Return the side of square images that the metadata names."""
    match = re.fullmatch(r"(\d{2,4})x(\d{2,4})", header.metadata.get("modelspec.resolution", ""), re.ASCII)
    side_px = int(match[1]) if match and match[1] == match[2] else 0
    return side_px if 64 <= side_px <= 2048 and side_px % 64 == 0 else None
