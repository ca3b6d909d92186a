"""Says by the header of a single file, safetensors or GGUF, whether it has a transformer, and of which family."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Overrides
from noria.models.diffusion.folders.transformer_models.z_image_folder import ZImageOverrides
from noria.models.diffusion.single_file.checkpoint import VAE, Checkpoint, checkpoint_of, read_beside
from noria.models.diffusion.single_file.checkpoint_header import CheckpointHeader, read_checkpoint_header
from noria.models.diffusion.single_file.known_files import describe_other_file
from noria.models.diffusion.single_file.stored_numbers import FLOATS, SCALES
from noria.models.diffusion.single_file.transformer_names import TransformerKind, find_transformer
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.gguf_file import GgufHeader, read_gguf_header
from noria.models.files.weights import Shapes

ENCODERS: Mapping[str, Mapping[str, str]] = {
    "flux": {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"},
    "chroma": {"text_encoder": "t5xxl"},
    "stable-diffusion-3": {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"},
    "z-image": {"text_encoder": "qwen3_4b"},
}
"""ComfyUI's names of the text encoders that can be in a file, by family and part."""


@dataclass(frozen=True)
class TransformerFile:
    """A file with a transformer, and perhaps other parts of its model."""

    file: pathlib.Path
    header: CheckpointHeader | GgufHeader
    kind: TransformerKind
    prefix: str  # the start of the names of the transformer's tensors

    @property
    def shapes(self) -> Shapes:
        """The shapes of the transformer's tensors, by their names without the prefix."""
        return {
            name.removeprefix(self.prefix): tensor.shape
            for name, tensor in self.header.tensors.items()
            if name.startswith(self.prefix)
        }

    @cached_property
    def other_parts(self) -> Mapping[str, str]:
        """The prefixes of the text encoders and the VAE that are in the file, too, by part."""
        encoders = ENCODERS.get(self.kind.family, {}).items()
        prefixes = {part: [f"text_encoders.{name}.transformer."] for part, name in encoders} | {"vae": [*VAE]}
        return {
            part: prefix
            for part, allowed in prefixes.items()
            for prefix in allowed
            if self.kind.family != "qwen-image" and any(name.startswith(prefix) for name in self.header.tensors)
        }

    @property
    def overrides(self) -> bytes:
        """The content of its MODEL.noria.json; empty: there is none."""
        return read_beside(self.file, ZImageOverrides if self.kind.family == "z-image" else Overrides)[0]

    def describe(self) -> str:
        """Return what it is, in words."""
        names = self.header.tensors
        if isinstance(self.header, GgufHeader):
            dtypes = sorted({tensor.type_name for tensor in self.header.tensors.values() if len(tensor.shape) > 1})
        else:
            own = self.header.starting(self.prefix).values()
            dtypes = sorted({FLOATS.get(tensor.dtype, tensor.dtype) for tensor in own if len(tensor.shape) > 1})
        words = [f"{self.kind.title}, {' and '.join(dtypes)}"]
        words[0] += " with scales" if any(name.endswith(SCALES) for name in names) else ""
        if self.kind.family == "flux":
            has_guidance = any("guidance_in." in name or "guidance_embedder." in name for name in names)
            words.append("takes the guidance, as dev" if has_guidance else "takes no guidance, as schnell")
        words.append(f"with {', '.join(self.other_parts)}" if self.other_parts else "the transformer alone")
        return ", ".join(words)


def read_single_file(file: pathlib.Path) -> Checkpoint | TransformerFile:
    """Return what a file is.

    Raises ModelError: it is damaged, or no model of a family that is served from one file, or its noria.json is not
    valid.
    """
    if file.suffix.lower() == GGUF_SUFFIX:
        gguf = read_gguf_header(file)
        if found := find_transformer(gguf.tensors):
            return TransformerFile(file, gguf, *found)
        raise ModelError(f"{file} {describe_other_file(gguf.tensors)}")
    header = read_checkpoint_header(file)
    if found := find_transformer(header.tensors):
        return TransformerFile(file, header, *found)
    return checkpoint_of(header)
