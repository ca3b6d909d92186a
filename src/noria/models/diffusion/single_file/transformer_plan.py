"""Plans the folder that the file of a transformer becomes: its own parts, and links to the files of another folder.

That folder has what the file lacks: tokenizers and the scheduler always, text encoders and the VAE mostly. All that can
be wrong with the file is found here, by its header.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from noria.errors import ModelError
from noria.models.diffusion.single_file.checkpoint import VAE
from noria.models.diffusion.single_file.checkpoint_header import CheckpointHeader, content_digest
from noria.models.diffusion.single_file.folder_plan import IN_DIFFUSERS_NAMES, naming
from noria.models.diffusion.single_file.part_configs import VERSION
from noria.models.diffusion.single_file.part_names import Origin, Origins, find_clip_tensors, find_vae_tensors
from noria.models.diffusion.single_file.stored_numbers import BESIDE_LAYERS
from noria.models.diffusion.single_file.tensor_copy import OnWritten, WeightsPlan
from noria.models.diffusion.single_file.transformer_configs import transformer_settings
from noria.models.diffusion.single_file.transformer_file import ENCODERS, TransformerFile
from noria.models.diffusion.single_file.transformer_names import TransformerKind, find_transformer_tensors
from noria.models.families import FAMILIES, identify_family
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.sentencepiece_file import SPIECE
from noria.models.files.weights import REDOWNLOAD_HINT, identifying_bytes, read_object, weight_files

_TEXTS = (".json", ".txt", ".jinja")


def choose_parts(kind: TransformerKind, folders: Iterable[pathlib.Path], file: pathlib.Path) -> pathlib.Path:
    """Return the first of the folders that is of the transformer's family.

    Raises ModelError: there is none, or one is no model's folder.
    """
    found = {folder: identify_family(folder) for folder in folders}
    for folder, family in found.items():
        if family.name == kind.family:
            return folder.absolute()
    named = ", ".join(f"{folder} is of {family.description}" for folder, family in found.items())
    raise ModelError(
        f"{file}: has the transformer of {kind.title}. Name a folder in diffusers format that has the tokenizers, the "
        f"scheduler and what else the file lacks: --parts FOLDER, or a hub id such as {kind.example}"
        f"{f'; {named}' if named else ''}."
    )


class TransformerPlan:
    """A folder that can be written."""

    def __init__(self, source: TransformerFile, parts: pathlib.Path, vae: CheckpointHeader | None) -> None:
        """Plan a folder with the parts of a folder of the same family; `vae` is the file of a VAE instead of those.

        Raises ModelError: a part is in neither, incomplete, or of another model.
        """
        self._source, self._parts, self._vae = source, parts, vae
        self._weights: dict[str, WeightsPlan] = {}  # by the path of their file
        self._texts: dict[str, str] = {}
        self.links: dict[str, pathlib.Path] = {"model_index.json": parts / "model_index.json"}
        family = FAMILIES[source.kind.family]
        try:
            settings = self._add_transformer()
        except ModelError as error:
            raise naming(source.file, error) from None
        self._add_scheduler(settings)
        for part in family.parts:
            if part not in ("transformer", "scheduler"):
                self._add_part(part, family.parts[part].weights)
        if missing := next((target for target in self.links.values() if not target.is_file()), None):
            raise ModelError(f"{missing}: missing, and {source.file} does not have it either. {REDOWNLOAD_HINT}")

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights that are written."""
        return sum(weights.num_bytes for weights in self._weights.values())

    def identity(self) -> Iterable[bytes]:
        """Yield what the folder is made of."""
        yield repr((self._source.kind.family, str(self._parts), sorted(self._weights), self._texts)).encode()
        header, vae = self._source.header, [] if self._vae is None else [self._vae]
        if isinstance(header, CheckpointHeader):
            yield content_digest([header, *vae]).encode()
        else:
            yield str(self._source.file).encode()
            yield from identifying_bytes(self._source.file)
            yield content_digest(vae).encode()

    def write(self, folder: pathlib.Path, on_written: OnWritten) -> None:
        """Write the folder, which exists and is empty, without the links. Raises as `WeightsPlan.write`."""
        for path in (*self._texts, *self._weights, *self.links):
            (folder / path).parent.mkdir(exist_ok=True)
        for path, text in self._texts.items():
            (folder / path).write_text(text)
        for path, weights in self._weights.items():
            weights.write(folder / path, on_written)

    def _add_transformer(self) -> Mapping[str, Any]:
        """Add the transformer, and return the settings that its file tells."""
        source, shapes = self._source, self._source.shapes
        origins = find_transformer_tensors(source.kind, shapes)
        settings = transformer_settings(source.kind.family, shapes, origins)
        if isinstance(source.header, CheckpointHeader):
            weights = WeightsPlan(source.header, source.prefix, origins)
            self._weights["transformer/diffusion_pytorch_model.safetensors"] = weights
        else:
            self.links[f"transformer/{source.file.stem}{GGUF_SUFFIX}"] = source.file
        own = self._own_config("transformer", source.kind.class_name)
        own.pop("quantization_config", None)
        self._texts["transformer/config.json"] = _json(
            {"_class_name": source.kind.class_name, "_diffusers_version": VERSION} | own | settings
        )
        return settings

    def _own_config(self, part: str, class_name: str) -> dict[str, Any]:
        """Return the configuration that the other folder has of a part, if it is of this class."""
        file = self._parts / part / "config.json"
        config = read_object(file) if file.exists() else {}
        return config if config.get("_class_name") == class_name else {}

    def _add_scheduler(self, settings: Mapping[str, Any]) -> None:
        """Add the scheduler of the other folder; FLUX.1 has a shift by the image's size if it takes the guidance."""
        path = "scheduler/scheduler_config.json"
        takes_guidance = settings.get("guidance_embeds")
        own = self._own_config("transformer", self._source.kind.class_name).get("guidance_embeds")
        if self._source.kind.family != "flux" or own == takes_guidance:
            self.links[path] = self._parts / path
            return
        shifts = {"use_dynamic_shifting": takes_guidance, "shift": 3.0 if takes_guidance else 1.0}
        self._texts[path] = _json(read_object(self._parts / path) | shifts)

    def _add_part(self, part: str, stem: str) -> None:
        """Add a part, with the weights of the VAE's file, of the transformer's file, or of the other folder."""
        header, prefix, origins = self._source.header, self._source.other_parts.get(part), None
        if part == "vae" and self._vae is not None:
            header = self._vae
            prefix = next((each for each in VAE if any(name.startswith(each) for name in header.tensors)), "")
        if prefix is not None and isinstance(header, CheckpointHeader):
            origins = self._origins(part, header, prefix)
        if origins is not None and prefix is not None and isinstance(header, CheckpointHeader):
            self._link(part, ["config.json"])
            self._weights[f"{part}/{stem}.safetensors"] = WeightsPlan(header, prefix, origins)
            return
        folder = self._parts / part
        texts = [file.name for file in folder.glob("*") if file.suffix in _TEXTS or file.name == SPIECE]
        if not stem:
            self._link(part, texts)
            return
        try:
            files = weight_files(self._parts, part, stem)
        except ModelError as error:
            raise ModelError(
                f"{self._source.file}: has no {part}, which comes from the folder of --parts: {error.message}"
            ) from None
        self._link(part, ["config.json", *texts, *(file.name for file in files)])

    def _origins(self, part: str, header: CheckpointHeader, prefix: str) -> Origins | None:
        """Return what a part is made of that is in a file with this prefix; None: it must come from the folder."""
        names = header.starting(prefix)
        if part == "vae":
            if "decoder.conv_in.weight" not in names or self._source.kind.family == "qwen-image":
                raise ModelError(
                    f"{header.file}: has no VAE of {self._source.kind.title} that can be read from a file. Leave out "
                    "--vae, and that of the folder of --parts is used."
                )
            if IN_DIFFUSERS_NAMES in names:
                return {name: Origin(name) for name in names}
            config = self._own_config("vae", "AutoencoderKL")
            return find_vae_tensors(names, has_quant_convolutions=bool(config.get("use_quant_conv", True))).origins
        config_file = self._parts / part / "config.json"
        architectures = read_object(config_file).get("architectures") if config_file.exists() else None
        if ENCODERS[self._source.kind.family][part].startswith("clip"):
            found = find_clip_tensors(names).origins
            if architectures == ["CLIPTextModelWithProjection"]:
                if "text_projection.weight" not in names:
                    return None
                found["text_projection.weight"] = Origin("text_projection.weight")
            return found
        return {name: Origin(name) for name in names if not name.endswith(BESIDE_LAYERS)}

    def _link(self, part: str, names: Iterable[str]) -> None:
        """Link files of a part of the other folder."""
        for name in dict.fromkeys(names):
            self.links[f"{part}/{name}"] = self._parts / part / name
        if part.startswith("tokenizer") and not any(path.startswith(f"{part}/") for path in self.links):
            raise ModelError(f"{self._parts / part}: is missing or empty, and no file of a model has a tokenizer.")


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"
