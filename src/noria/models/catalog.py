"""Checks all of a model folder before any process starts, so that a bad one is rejected early and clearly.

`location.py` finds the folder, `families.py` says which family it is of, and that family's module checks and describes
what is in it. Here is what all families share: a model's name and its fingerprint. This module knows no family and no
torch.
"""

import pathlib
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.families import FAMILIES, identify_family
from noria.models.family import Family
from noria.models.files.sentencepiece_file import SPIECE, needs_pieces
from noria.models.files.weights import (
    identifying_bytes,
    num_tensor_parameters,
    read_object,
    read_struct,
    read_text,
    read_weights,
    short_digest,
    weight_files,
)
from noria.models.location import locate
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.model_spec import ModelSpec

SpecT = TypeVar("SpecT", bound=ModelSpec)

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+/-]{1,128}\Z")]  # valid in an HTTP header


class _Overrides(Struct, frozen=True):
    """noria.json: the model's name, set by its author. Its other keys are the family's."""

    name: Name | None = None


def open_model(name: str, engine: EngineConfig | None = None) -> AnyModelSpec:
    """Check a model and return its spec.

    `name` is what `locate` takes; `engine` says where a single file is converted to, and with which VAE.

    Raises:
        MissingExtra: a package that serving it needs is not installed.
        ModelError: the model does not exist, a file is damaged, or its family or a part is not supported.
    """
    folder, default_name = locate(name, engine)
    family = identify_family(folder)
    spec = family.inspect(folder)
    overrides = read_struct(folder / "noria.json", _Overrides) if (folder / "noria.json").exists() else _Overrides()
    fingerprint = fingerprint_of(folder, family)
    return msgspec.structs.replace(spec, name=overrides.name or default_name, fingerprint=fingerprint)


def open_model_of(spec_type: type[SpecT], name: str, engine: EngineConfig) -> SpecT:
    """Check a model of one kind and return its spec.

    Raises ModelError: as `open_model`, or the model is of another kind.
    """
    spec = open_model(name, engine)
    if isinstance(spec, spec_type):
        return spec
    raise ModelError(f"{name} is a model of kind {spec.kind}; this needs one of kind {spec_type.kind}.")


def count_parameters(spec: ModelSpec) -> int:
    """Count the parameters of all parts, from the headers of the weights."""
    stems = FAMILIES[spec.family].weight_stems_in(spec.path)
    return sum(num_tensor_parameters(read_weights(spec.path, part, stem)) for part, stem in stems.items())


def have_same_architecture(first: ModelSpec, second: ModelSpec) -> bool:
    """Whether two models differ in their weights at most, so that a call of either takes as long.

    False, too, if the files of one are no longer there.
    """
    if first.family != second.family:
        return False
    try:
        return _architecture(first) == _architecture(second)
    except ModelError:
        return False


def _architecture(spec: ModelSpec) -> list[dict[str, object]]:
    """The configurations of the parts with weights, without the keys that say where they come from.

    Of LoRAs it is the shapes: PEFT also writes its version and the name of the base model, and layers in any order.
    """
    family = FAMILIES[spec.family]
    parts = family.parts_in(spec.path)
    return [
        {**read_weights(spec.path, name, stem)}
        if parts[name].config == "adapter_config.json"
        else {k: v for k, v in read_object(spec.path / name / parts[name].config).items() if not k.startswith("_")}
        for name, stem in family.weight_stems_in(spec.path).items()
    ]


def fingerprint_of(folder: pathlib.Path, family: Family) -> str:
    """Return 12 digits of a SHA-256 over what identifies a folder, as `ModelSpec.fingerprint`."""
    return short_digest(_fingerprint_parts(folder, family))


def _fingerprint_parts(folder: pathlib.Path, family: Family) -> Iterator[bytes]:
    """Yield what identifies a model: all configurations, and `identifying_bytes` of the weights.

    Of the same folder it must be the same in all versions of Noria: registered models are found by it.
    """
    for part in (name for name, each in family.parts_in(folder).items() if each.is_identifying):
        for file in sorted((folder / part).glob("*")):
            if file.suffix in (".json", ".txt") or (file.name == SPIECE and needs_pieces(folder / part)):
                yield file.name.encode()
                yield read_text(file)
    for name in ("chat_template.jinja", "artifact.metadata"):  # rerankers' and ColBERT's, which have no pooling
        if "" in family.parts and (folder / name).exists() and not (folder / "1_Pooling").exists():
            yield name.encode()
            yield read_text(folder / name)
    for file in sorted(folder.glob("*_linear.safetensors")) if "" in family.parts else ():  # bge-m3's
        yield from identifying_bytes(file)
    defaults = folder / "noria.json"
    if "" not in family.parts and defaults.exists():
        yield defaults.name.encode()
        yield read_text(defaults)
    for part, stem in family.weight_stems_in(folder).items():
        for file in weight_files(folder, part, stem):
            yield from identifying_bytes(file)
