"""Plans the folder in diffusers format that a checkpoint becomes: configurations, weights of each part, tokenizers.

All that can be wrong with a file is found here, by its header, before any weights are read.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from noria.errors import ModelError, short_repr
from noria.models.diffusion.single_file.checkpoint import TEXT_ENCODERS, UNET, VAE, Checkpoint
from noria.models.diffusion.single_file.checkpoint_header import CheckpointHeader, content_digest
from noria.models.diffusion.single_file.clip_tokenizer import write_clip_tokenizer
from noria.models.diffusion.single_file.part_configs import (
    VERSION,
    FamilySettings,
    clip_config,
    scheduler_config,
    unet_config,
    vae_config,
)
from noria.models.diffusion.single_file.part_names import (
    ClipTensors,
    Origin,
    find_clip_tensors,
    find_diffusers_vae_tensors,
    find_open_clip_tensors,
    find_vae_tensors,
)
from noria.models.diffusion.single_file.stored_numbers import BESIDE_LAYERS
from noria.models.diffusion.single_file.tensor_copy import OnWritten, WeightsPlan
from noria.models.diffusion.single_file.unet_names import find_unet_tensors
from noria.models.families import FAMILIES

IN_DIFFUSERS_NAMES = "encoder.down_blocks.0.resnets.0.conv1.weight"
"""A tensor of each VAE whose names are diffusers'."""


class FolderPlan:
    """A folder that can be written."""

    def __init__(self, checkpoint: Checkpoint, vae: CheckpointHeader | None) -> None:
        """Plan a folder; `vae` is the file of a VAE instead of the checkpoint's own.

        Raises ModelError: a part is not in it, incomplete, or of another model.
        """
        self._checkpoint, self._vae = checkpoint, vae
        self._weights: dict[str, WeightsPlan] = {}
        self.configs: dict[str, dict[str, Any]] = {}  # configurations of the parts with weights
        self._tokenizers: dict[str, str] = {}  # pad tokens by folder
        self.links: Mapping[str, pathlib.Path] = {}  # a checkpoint has all parts in itself
        header = checkpoint.header
        try:
            for part, prefix in TEXT_ENCODERS[checkpoint.family].items():
                self._add_text_encoder(part, prefix)
            text_width = sum(each["hidden_size"] for each in self.configs.values())
            self._add_unet(text_width)
        except ModelError as error:
            raise naming(header.file, error) from None
        if checkpoint.family != "refiner":
            self._add_vae(vae)
            factor = 2 ** (len(self.configs["vae"]["block_out_channels"]) - 1)
            self.configs["unet"]["sample_size"] = checkpoint.side_px // factor

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(weights.num_bytes for weights in self._weights.values())

    def identity(self) -> Iterable[bytes]:
        """Yield what the folder is made of."""
        checkpoint = self._checkpoint
        yield repr((checkpoint.family, checkpoint.predicts_v, checkpoint.has_zero_snr, checkpoint.side_px)).encode()
        yield content_digest([checkpoint.header, *([] if self._vae is None else [self._vae])]).encode()

    def write(self, folder: pathlib.Path, on_written: OnWritten) -> None:
        """Write the folder, which exists and is empty. Raises as `WeightsPlan.write`."""
        checkpoint = self._checkpoint
        parts = FAMILIES[_FAMILY_NAMES[checkpoint.family]].parts
        for part, weights in self._weights.items():
            (folder / part).mkdir()
            _write_json(folder / part / "config.json", self.configs[part])
            stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
            weights.write(folder / part / f"{stem}.safetensors", on_written)
        for part, pad_token in self._tokenizers.items():
            write_clip_tokenizer(folder / part, pad_token)
        scheduler = scheduler_config(
            checkpoint.family, predicts_v=checkpoint.predicts_v, has_zero_snr=checkpoint.has_zero_snr
        )
        (folder / "scheduler").mkdir()
        _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
        index = self._index(checkpoint.settings)
        index |= {part: _entry(self.configs[part]) for part in parts if part in self.configs}
        index |= {part: ["transformers", "CLIPTokenizer"] for part in self._tokenizers}
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
        _write_json(folder / "model_index.json", index)

    def _index(self, settings: FamilySettings) -> dict[str, Any]:
        """Return the model_index.json, without the parts."""
        family = self._checkpoint.family
        pipeline = settings.inpainting_pipeline if self._checkpoint.is_for_inpainting else settings.pipeline
        index: dict[str, Any] = {
            "_class_name": pipeline,
            "_diffusers_version": VERSION,
            "feature_extractor": [None, None],
        }
        if family in ("sd1", "sd2"):
            return index | {"safety_checker": [None, None], "requires_safety_checker": False}
        index |= {"force_zeros_for_empty_prompt": family == "sdxl"}
        if family == "refiner":
            absent = ("tokenizer", "text_encoder", "vae")
            index |= {"requires_aesthetics_score": True, **{part: [None, None] for part in absent}}
        return index

    def _add_text_encoder(self, part: str, prefix: str) -> None:
        tensors = self._checkpoint.header.starting(prefix)
        is_second = part == "text_encoder_2"
        found: ClipTensors
        if is_second or self._checkpoint.family == "sd2":
            found = find_open_clip_tensors(tensors, has_projection=is_second)
        else:
            found = find_clip_tensors(tensors)
        self._weights[part] = WeightsPlan(self._checkpoint.header, prefix, found.origins)
        self.configs[part] = clip_config(tensors, found)
        is_open_clip = self.configs[part]["hidden_act"] == "gelu"
        self._tokenizers[part.replace("text_encoder", "tokenizer")] = "!" if is_open_clip else "<|endoftext|>"

    def _add_unet(self, text_width: int) -> None:
        header, settings = self._checkpoint.header, self._checkpoint.settings
        tensors = header.starting(UNET)
        found = find_unet_tensors(tensors)
        needed = set(found.names.values())
        if unknown := sorted(name for name in tensors if name not in needed and not name.endswith(BESIDE_LAYERS)):
            raise ModelError(
                f"its UNet has {len(unknown)} tensors that no UNet of {settings.title} has, the first is "
                f"{short_repr(unknown[0])}."
            )
        self._weights["unet"] = WeightsPlan(
            header, UNET, {target: Origin(name) for target, name in found.names.items()}
        )
        pooled_width = self.configs["text_encoder_2"]["projection_dim"] if settings.num_sizes else 0
        config = unet_config(tensors, found, settings, pooled_width)
        if config["cross_attention_dim"] != text_width:
            raise ModelError(
                f"its UNet takes texts of width {config['cross_attention_dim']}, its text encoders make {text_width}: "
                f"it is not {settings.title}."
            )
        self.configs["unet"] = config

    def _add_vae(self, file: CheckpointHeader | None) -> None:
        if file is None:
            if self._checkpoint.vae_prefix is None:
                raise ModelError(
                    f"{self._checkpoint.header.file}: has no VAE. Name a file that has one for "
                    f"{self._checkpoint.settings.title}: --vae FILE.safetensors."
                )
            header, prefix = self._checkpoint.header, self._checkpoint.vae_prefix
        else:
            header = file
            prefix = next((each for each in VAE if any(name.startswith(each) for name in file.tensors)), "")
        tensors = header.starting(prefix)
        if "decoder.conv_in.weight" not in tensors:
            raise ModelError(
                f"{header.file}: is no VAE: it has no decoder.conv_in.weight. Name another file: --vae FILE."
            )
        has_own_names = IN_DIFFUSERS_NAMES in tensors
        found = find_diffusers_vae_tensors(tensors) if has_own_names else find_vae_tensors(tensors)
        origins = {name: Origin(name) for name in tensors} if has_own_names else found.origins
        try:
            self._weights["vae"] = WeightsPlan(header, prefix, origins)
            self.configs["vae"] = vae_config(tensors, found, self._checkpoint.settings, self._checkpoint.side_px)
        except ModelError as error:
            raise naming(header.file, error) from None


_FAMILY_NAMES: Mapping[str, str] = {
    "sd1": "stable-diffusion",
    "sd2": "stable-diffusion",
    "sdxl": "stable-diffusion-xl",
    "refiner": "stable-diffusion-xl-refiner",
}


def _entry(config: Mapping[str, Any]) -> list[str]:
    """Return the library and the class of a part, from its configuration."""
    if "architectures" in config:
        return ["transformers", config["architectures"][0]]
    return ["diffusers", config["_class_name"]]


def naming(file: pathlib.Path, error: ModelError) -> ModelError:
    """Return the error with the file's name in it."""
    return error if error.message.startswith(str(file)) else ModelError(f"{file}: {error.message}")


def _write_json(file: pathlib.Path, tree: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(tree, indent=2) + "\n")
