"""The common part of the folders of all diffusion families: configurations, checks, and the defaults of noria.json.

The `*_folder.py` of a family inspects its folders with it. This module knows neither torch nor what the parts compute.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.errors import InvalidField, ModelError, short_repr
from noria.extras import check_installed
from noria.images import scheduler_names
from noria.models.diffusion.folders.quantization import SERVED, read_quantization
from noria.models.family import Family
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.weights import (
    GGUF_PART,
    REDOWNLOAD_HINT,
    Shapes,
    num_tensor_parameters,
    read_object,
    read_struct,
    read_weights,
    weight_files,
)
from noria.protocol.diffusion import MIN_CALLS, DiffusionModelSpec

# Keys by which the libraries choose what they import or download, and the values that they write themselves.
_CODE_KEYS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            f"{prefix}{part}_implementation{suffix}"
            for prefix in ("", "_")
            for part in ("attn", "experts")
            for suffix in ("", "_internal")
        ),
        ("eager", "sdpa"),
    ),
    **dict.fromkeys(
        ("quantization_config", "compression_config", "auto_map", "custom_pipelines", "trust_remote_code"), ()
    ),
}

Count = Annotated[int, Meta(ge=1)]
"""A number of layers, channels and so on."""


class _AddedToken(Struct, frozen=True):
    id: int


class PartConfig(Struct, frozen=True):
    """The settings of a part that decide whether it is supported, and its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")


class VaeConfig(PartConfig, frozen=True):
    """The settings of a VAE that decide its sizes."""

    latent_channels: Count = 4
    block_out_channels: Annotated[tuple[Count, ...], Meta(max_length=8)] | None = None
    # AutoencoderTiny saved by an older diffusers.
    encoder_block_out_channels: Annotated[tuple[Count, ...], Meta(max_length=8)] | None = None

    @property
    def factor(self) -> int:
        """Pixels per latent along one side, as diffusers' pipeline computes it."""
        default = (64,) if self.class_name == "AutoencoderKL" else (64,) * 4
        blocks = self.block_out_channels or self.encoder_block_out_channels or default
        return int(2 ** (len(blocks) - 1))


class Overrides(Struct, frozen=True, forbid_unknown_fields=True):
    """noria.json: defaults for requests, set by the model's author; families add settings of their own."""

    name: str | None = None  # `models/catalog.py` reads it
    default_scheduler: str | None = None
    default_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    default_guidance: Annotated[float, Meta(ge=0, le=50)] | None = None
    default_calls: Annotated[float, Meta(ge=MIN_CALLS, le=1)] = 1.0  # where calls can be skipped
    safety_classifier: str = ""  # a folder in the model's, where the operator has no classifier for the model
    safety_labels: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    safety_threshold: Annotated[float, Meta(gt=0, le=1)] = 1.0


@dataclass(frozen=True)
class Sides:
    """The widths and heights of images, in pixels."""

    default_width_px: int
    default_height_px: int
    min_side_px: int
    max_side_px: int
    multiple_px: int


_MAX_SIDE_PX = 4096  # an image of more has 50 MB of pixels


def sides_around(side_px: int, multiple_px: int) -> Sides:
    """Return the sides of a model that was trained at `side_px` in any ratio: up to twice as long, or 4096 px."""
    longest_px = min(2 * side_px, _MAX_SIDE_PX) // multiple_px * multiple_px
    side_px = max(min(side_px, longest_px) // multiple_px * multiple_px, multiple_px)
    return Sides(side_px, side_px, min(4 * multiple_px, side_px), max(longest_px, side_px), multiple_px)


PartT = TypeVar("PartT", bound=PartConfig)
OverridesT = TypeVar("OverridesT", bound=Overrides)


@dataclass(frozen=True)
class PipelineFolder:
    """A model folder whose index names classes that its family lists, and whose parts choose no code.

    What it reads raises ModelError if it is missing, damaged or not supported.
    """

    path: pathlib.Path
    family: Family
    pipeline: str  # its class

    @classmethod
    def open(cls, path: pathlib.Path, family: Family) -> Self:
        """Check the index, and that no part's configuration chooses code."""
        file = path / "model_index.json"
        index = read_object(file)
        for part in family.parts:
            if family.parts[part].classes:
                entry = index.get(part)
                family.check_class(file, part, entry[1] if isinstance(entry, list) and len(entry) == 2 else entry)
            if part.startswith(("tokenizer", "processor")):
                check_chooses_no_code(path / part / "tokenizer_config.json")
        for part in family.weight_stems:
            file = path / part / "config.json"
            is_quantized = part != "vae" and read_quantization(file) is not None
            if part == GGUF_PART and any(file.parent.glob(f"*{GGUF_SUFFIX}")):
                check_installed(("gguf", "accelerate"), "quantized", f"the model in {path}")
                if is_quantized:
                    raise ModelError(f"{file}: quantization_config is not of the GGUF file beside it. Remove the key.")
            check_chooses_no_code(file, {"quantization_config"} if is_quantized else frozenset())
        return cls(path, family, str(index["_class_name"]))

    def config_file(self, part: str) -> pathlib.Path:
        """Return the file with the configuration of a part, other than the scheduler."""
        return self.path / part / "config.json"

    @property
    def scheduler_file(self) -> pathlib.Path:
        """The file with the configuration of the scheduler."""
        return self.path / "scheduler" / "scheduler_config.json"

    @functools.cached_property
    def shapes(self) -> Mapping[str, Shapes]:
        """The shapes of the weights of all parts, by part."""
        return {part: read_weights(self.path, part, stem) for part, stem in self.family.weight_stems.items()}

    def read_part(self, part: str, kind: type[PartT]) -> PartT:
        """Return the settings of a part, of a class that the family lists."""
        settings = read_struct(self.config_file(part), kind)
        self.family.check_class(self.config_file(part), part, settings.class_name)
        return settings

    def read_overrides(self, kind: type[OverridesT]) -> OverridesT:
        """Return what noria.json says."""
        file = self.path / "noria.json"
        return read_struct(file, kind) if file.exists() else kind()

    def check_layer(self, part: str, names: tuple[str, ...], expected: Mapping[str, tuple[int, int]]) -> None:
        """Check one tensor of a part: weights of another model would fail only when loaded, with a stack trace.

        It has the first of `names` that is there: in a GGUF file it may have that of the original checkpoint.
        `expected` has an axis and its length by the setting that says it.
        """
        shapes = self.shapes[part]
        shape = next((shapes[name] for name in names if name in shapes), None)
        if shape is None or any(len(shape) <= axis or shape[axis] != length for axis, length in expected.values()):
            raise ModelError(
                f"{weight_files(self.path, part, self.family.weight_stems[part])[0]}: {names[0]} is "
                f"{list(shape) if shape else 'missing'}, but config.json has {' and '.join(expected)} "
                f"{', '.join(str(length) for _, length in expected.values())}: weights and configuration belong to two "
                f"models. {REDOWNLOAD_HINT}"
            )

    def make_spec(
        self,
        sides: Sides,
        schedulers: tuple[str, ...],
        *,
        steps: int,
        guidance: float,
        scheduler: str = "",
        overrides: Overrides | None = None,
        denoiser: str = "transformer",
        **settings: Any,
    ) -> DiffusionModelSpec:
        """Return the spec, without name and fingerprint, with the defaults given here unless noria.json has others.

        `scheduler` is the default where the folder's own is not among `schedulers`, which is else the first of them.
        `overrides` are noria.json's if the family has more of them.
        """
        overrides = overrides or self.read_overrides(Overrides)
        return DiffusionModelSpec(
            name="",  # the catalog sets name and fingerprint
            folder=str(self.path),
            fingerprint="",
            family=self.family.name,
            pipeline=self.pipeline,
            **dataclasses.asdict(sides),
            default_scheduler=self._default_scheduler(overrides, scheduler or schedulers[0], schedulers),
            schedulers=schedulers,
            default_steps=steps if overrides.default_steps is None else overrides.default_steps,
            default_guidance=guidance if overrides.default_guidance is None else overrides.default_guidance,
            default_calls=overrides.default_calls,
            safety_classifier=self._safety_classifier(overrides),
            safety_labels=overrides.safety_labels,
            safety_threshold=overrides.safety_threshold,
            num_parameters=num_tensor_parameters(self.shapes[denoiser]),
            **settings,
        )

    def _safety_classifier(self, overrides: Overrides) -> str:
        """Return the folder that noria.json names, which a stranger may have written: one elsewhere is refused."""
        name = overrides.safety_classifier
        folder = self.path / name
        if name and (not folder.resolve().is_relative_to(self.path.resolve()) or not folder.is_dir()):
            raise ModelError(
                f"{self.path / 'noria.json'}: safety_classifier is {short_repr(name)}; needed is a folder inside the "
                "model's. One elsewhere is named by the operator: engine.safety_classifiers."
            )
        return str(folder) if name else ""

    def _default_scheduler(self, overrides: Overrides, of_family: str, allowed: tuple[str, ...]) -> str:
        """Return the scheduler of noria.json, else the one nearest to scheduler_config.json, else the family's."""
        if overrides.default_scheduler is None:
            try:
                name = scheduler_names.choice_for_config(read_object(self.scheduler_file)).name
            except InvalidField:
                return of_family
            return name if name in allowed else of_family
        file = self.path / "noria.json"
        try:
            name = scheduler_names.find(overrides.default_scheduler).name
        except InvalidField as error:
            raise ModelError(f"{file}: default_scheduler: {error.message}") from error
        name = f"flow-{name}" if f"flow-{name}" in allowed else name
        if name not in allowed:
            raise ModelError(f"{file}: default_scheduler is {name}; supported are {', '.join(allowed)}.")
        return name


def check_chooses_no_code(file: pathlib.Path, checked: Set[str] = frozenset()) -> None:
    """Check that a part's configuration, at any depth, chooses no code, and that no adapter replaces the part.

    Of its outermost keys, those in `checked` were found to be harmless before.
    """
    adapter_file = file.parent / "adapter_config.json"
    if adapter_file.exists():
        raise ModelError(f"{adapter_file}: adapters are not supported. Merge it into the model, and remove the file.")
    pending: list[object] = [{key: value for key, value in read_object(file).items() if key not in checked}]
    while pending:
        tree = pending.pop()
        if isinstance(tree, dict):
            for key in tree.keys() & _CODE_KEYS.keys():
                if tree[key] and tree[key] not in _CODE_KEYS[key]:
                    raise ModelError(
                        f"{file}: {key} is {short_repr(tree[key])}, by which a model chooses code to import or "
                        f"download. Remove the key; attention is chosen by engine.attention. Quantized, {SERVED}."
                    )
        pending += tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


def check_vocabulary(folder: pathlib.Path, vocab_size: int) -> None:
    """Check that a tokenizer of byte pairs, in either file format, has no token id beyond the text encoder's."""
    file = folder / "tokenizer.json"
    added: object = []
    if file.exists():
        tree = read_object(file)
        model, added = tree.get("model"), tree.get("added_tokens") or []
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    else:
        file = folder / "vocab.json"
        vocabulary = read_object(file, "there is neither tokenizer.json nor vocab.json with merges.txt")
        if not (folder / "merges.txt").is_file():
            raise ModelError(f"{folder / 'merges.txt'}: missing, but vocab.json needs it. {REDOWNLOAD_HINT}")
    try:
        token_ids = msgspec.convert(vocabulary, dict[str, int])
        max_token_id = max(
            [*token_ids.values(), *(token.id for token in msgspec.convert(added, list[_AddedToken]))], default=-1
        )
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: contains no vocabulary from words to token ids. {REDOWNLOAD_HINT}") from error
    if max_token_id >= vocab_size:
        raise ModelError(
            f"{file}: has token ids up to {max_token_id}, but the text encoder has {vocab_size} tokens. "
            f"{REDOWNLOAD_HINT}"
        )
