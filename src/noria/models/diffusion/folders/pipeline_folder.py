"""What the folders of all diffusion families have in common: configurations, checks, and the defaults of noria.json.

The `*_folder.py` of a family inspects its folders with it. This module knows neither torch nor what the parts compute.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.errors import InvalidField, ModelError, short_repr
from noria.extras import check_installed
from noria.images import scheduler_names
from noria.models.diffusion.folders.quantization import SERVED, read_quantization
from noria.models.families import Family
from noria.models.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.weights import (
    GGUF_PART,
    REDOWNLOAD_HINT,
    Shapes,
    read_object,
    read_struct,
    read_weights,
    weight_files,
)
from noria.protocol.diffusion import DiffusionModelSpec

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


class VaeConfig(Struct, frozen=True):
    """The settings of a VAE that decide its sizes."""

    class_name: str = msgspec.field(name="_class_name")
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


OverridesT = TypeVar("OverridesT", bound="Overrides")


class Overrides(Struct, frozen=True, forbid_unknown_fields=True):
    """noria.json: defaults for requests, set by the model's author; families add settings of their own."""

    name: str | None = None  # `models/catalog.py` reads it
    default_scheduler: str | None = None
    default_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    default_guidance: Annotated[float, Meta(ge=0, le=50)] | None = None


def read_overrides(folder: pathlib.Path, kind: type[OverridesT]) -> OverridesT:
    """Return what noria.json says; raise ModelError if it is not valid."""
    file = folder / "noria.json"
    return read_struct(file, kind) if file.exists() else kind()


class _Named(Protocol):
    @property
    def class_name(self) -> str: ...


PartT = TypeVar("PartT", bound=_Named)


def read_part(folder: pathlib.Path, family: Family, part: str, kind: type[PartT]) -> PartT:
    """Return the settings of a part. Raises ModelError if they are not valid, or `family` lists no such class."""
    file = folder / part / "config.json"
    settings = read_struct(file, kind)
    family.check_class(file, part, settings.class_name)
    return settings


def read_shapes(folder: pathlib.Path, family: Family) -> dict[str, Shapes]:
    """Return the shapes of the weights of all parts, by part. Raises ModelError as `read_weights` does."""
    return {part: read_weights(folder, part, stem) for part, stem in family.weight_stems.items()}


def check_files(folder: pathlib.Path, family: Family) -> str:
    """Check that a folder's index names classes that `family` lists, and that no part's configuration chooses code.

    Return the class of the pipeline.
    """
    file = folder / "model_index.json"
    index = read_object(file)
    for part in family.parts:
        if family.parts[part].classes:
            entry = index.get(part)
            family.check_class(file, part, entry[1] if isinstance(entry, list) and len(entry) == 2 else entry)
        if part.startswith("tokenizer"):
            check_chooses_no_code(folder / part / "tokenizer_config.json")
    for part in family.weight_stems:
        file = folder / part / "config.json"
        is_quantized = part != "vae" and read_quantization(file) is not None
        if part == GGUF_PART and any(file.parent.glob(f"*{GGUF_SUFFIX}")):
            check_installed(("gguf", "accelerate"), "quantized", f"the model in {folder}")
            if is_quantized:
                raise ModelError(f"{file}: quantization_config is not of the GGUF file beside it. Remove the key.")
        check_chooses_no_code(file, {"quantization_config"} if is_quantized else frozenset())
    return str(index["_class_name"])


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


def make_spec(
    folder: pathlib.Path,
    family: Family,
    pipeline: str,
    overrides: Overrides,
    sides: Sides,
    schedulers: tuple[str, ...],
    *,
    steps: int,
    guidance: float,
    scheduler: str = "",
    **settings: Any,
) -> DiffusionModelSpec:
    """Return a folder's spec, without name and fingerprint, with the defaults given here unless `overrides` has others.

    `scheduler` is the default where the folder's own is not among `schedulers`, which is else the first of them.

    Raises:
        ModelError: noria.json names a scheduler that is not allowed.

    """
    return DiffusionModelSpec(
        name="",  # the catalog sets name and fingerprint
        folder=str(folder),
        fingerprint="",
        family=family.name,
        pipeline=pipeline,
        **dataclasses.asdict(sides),
        default_scheduler=_default_scheduler(folder, overrides, scheduler or schedulers[0], schedulers),
        schedulers=schedulers,
        default_steps=steps if overrides.default_steps is None else overrides.default_steps,
        default_guidance=guidance if overrides.default_guidance is None else overrides.default_guidance,
        **settings,
    )


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


def _default_scheduler(folder: pathlib.Path, overrides: Overrides, of_family: str, allowed: Sequence[str]) -> str:
    """Return the scheduler of noria.json, else the one nearest to scheduler_config.json, else the family's default.

    Raises:
        ModelError: noria.json names one that is not `allowed`.

    """
    if overrides.default_scheduler is None:
        try:
            name = scheduler_names.choice_for_config(read_object(folder / "scheduler" / "scheduler_config.json")).name
        except InvalidField:
            return of_family
        return name if name in allowed else of_family
    try:
        name = scheduler_names.find(overrides.default_scheduler).name
    except InvalidField as error:
        raise ModelError(f"{folder / 'noria.json'}: default_scheduler: {error.message}") from error
    name = f"flow-{name}" if f"flow-{name}" in allowed else name
    if name not in allowed:
        raise ModelError(f"{folder / 'noria.json'}: default_scheduler is {name}; supported are {', '.join(allowed)}.")
    return name


def check_layer(
    folder: pathlib.Path,
    family: Family,
    part: str,
    shapes: Shapes,
    names: tuple[str, ...],
    expected: Mapping[str, tuple[int, int]],
) -> None:
    """Check one tensor of a part: weights of another model would fail only when loaded, with a stack trace.

    It has the first of `names` that is there: in a GGUF file it may have that of the original checkpoint. `expected`
    has an axis and its length by the setting that says it.
    """
    shape = next((shapes[name] for name in names if name in shapes), None)
    if shape is None or any(len(shape) <= axis or shape[axis] != length for axis, length in expected.values()):
        raise ModelError(
            f"{weight_files(folder, part, family.weight_stems[part])[0]}: {names[0]} is "
            f"{list(shape) if shape else 'missing'}, but config.json has {' and '.join(expected)} "
            f"{', '.join(str(length) for _, length in expected.values())}: weights and configuration belong to two "
            f"models. {REDOWNLOAD_HINT}"
        )
