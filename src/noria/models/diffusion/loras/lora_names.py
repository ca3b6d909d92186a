"""The layer, and the one of its matrices, that a tensor of a LoRA file is, by the names of all programs. Pure.

A name is a prefix, which says the part of the model, a layer, by diffusers' or the author's name, and an ending. Kohya
and others have underscores in place of a layer's dots; a model's own modules tell which is meant.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from noria.models.diffusion.author_layers import authors_layers

_WRAPPERS = r"(?:(?:base_model\.model|_orig_mod|module|pipe\.dit)\.)*"
_PREFIX = re.compile(
    rf"{_WRAPPERS}(?:model\.(?=diffusion_model\.))?"
    r"(?:(?:(?:lora_unet|lora_transformer|lycoris)_(?:_orig_mod_)?|(?:unet|transformer|diffusion_model)\.)"
    r"|lora_(?P<kohya>te[123]?)_(?:_orig_mod_)?"
    r"|(?P<diffusers>text_encoder(?:_[23])?)\."
    rf"|text_encoders\.(?P<comfy>\w+)\.transformer\.)?{_WRAPPERS}"
)
_TEXT_PARTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("te", "te1", "clip_l", "clip_h"), ("text_encoder",)),
    **dict.fromkeys(("te2", "clip_g"), ("text_encoder_2",)),
    **dict.fromkeys(("te3", "t5xxl"), ("text_encoder_3", "text_encoder_2")),  # the last is FLUX.1's
}
_ADAPTER = r"(?:\.(?!weight\Z)(?P<adapter{}>[\w-]+))?"
_ENDING = re.compile(
    rf"\.(?:lora_(?P<matrix>A|B|down|up|mid){_ADAPTER.format(1)}\.weight"
    rf"|lora_(?:B|up){_ADAPTER.format(2)}\.(?P<up_bias>bias)"
    r"|(?:lora\.|lora_linear_layer\.)?(?P<old>down|up)\.weight"
    rf"|(?:lora_)?(?P<magnitude>magnitude)(?:_vector{_ADAPTER.format(3)})?(?:\.weight)?"
    r"|(?P<lycoris>alpha|dora_scale|hada_(?:t[12]|w[12]_[ab])|lokr_(?:w[12](?:_[ab])?|t2)|diff_b)"
    r"|(?:(?:weight|scale)\.)?(?P<diff>diff)|(?P<norm>w_norm|b_norm))\Z",
    re.ASCII,
)
_MATRICES = {"A": "down", "B": "up", "w_norm": "diff", "b_norm": "diff_b"}
_PROCESSOR = re.compile(r"\.processor\.(to_\w+)_lora$")
_TEXT_PROJECTION = re.compile(r"\.to_(q|k|v|out)_lora$")
_NUMBERS = ("0", "1", "2", "3")
_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Target:
    """A module that all or some outputs of a file's layer belong to."""

    module: str
    rows: tuple[tuple[int, int], ...] | None = None  # ranges of the file's outputs, in the module's order; None: all


class Named(NamedTuple):
    """A tensor's name, understood."""

    part: str  # as diffusers calls it
    targets: tuple[Target, ...]  # empty: the model has no such layer
    layer: str  # as the file has it
    matrix: str  # such as "down", "alpha" or "lokr_w1"; "down.0" is of the first module alone, as kohya's `split_qkv`
    adapter: str | None  # its name between layer and matrix


class LoraNames:
    """The names of the layers of one loaded model, the denoiser first."""

    def __init__(self, parts: Mapping[str, torch.nn.Module]) -> None:
        """`parts` are the model's by diffusers' names."""
        self._denoiser = next(iter(parts))
        self._layers = {name: _layers_of(part) for name, part in parts.items()}

    def find(self, name: str) -> Named | None:
        """Return what `name` means; None: it has no ending of a LoRA file's."""
        ending = _ENDING.search(name)
        if ending is None or not _NAME.fullmatch(name):
            return None
        found = {key: value for key, value in ending.groupdict().items() if value is not None}
        adapter = next((found.pop(key) for key in list(found) if key.startswith("adapter")), None)
        ((key, matrix),) = found.items()
        layer = name[: ending.start()]
        part, targets = self._find_layer(layer)
        matrix = "up_bias" if key == "up_bias" else _MATRICES.get(matrix, matrix)
        if adapter in _NUMBERS and len(targets) > 1:
            matrix, adapter = f"{matrix}.{adapter}", None
        return Named(part, targets, layer, matrix, adapter)

    def _find_layer(self, layer: str) -> tuple[str, tuple[Target, ...]]:
        """Return the part of a file's layer, and its modules there."""
        prefix = _PREFIX.match(layer)
        assert prefix, "it matches nothing, too"
        rest = layer[prefix.end() :]
        if prefix["diffusers"]:
            parts: tuple[str, ...] = (prefix["diffusers"],)
        elif text := prefix["kohya"] or prefix["comfy"]:
            parts = _TEXT_PARTS.get(text, (text,))
        else:
            parts = (self._denoiser,)
        for part in parts:
            form, named = (_PROCESSOR, r".\1") if part == self._denoiser else (_TEXT_PROJECTION, r".\1_proj")
            if targets := self._layers.get(part, {}).get(_key(form.sub(named, rest))):
                return part, targets
        return parts[0], ()


def _key(name: str) -> str:
    """Return a module's name as kohya has it; transformers 5 has taken `text_model` out of one of its classes."""
    return name.replace(".", "_").removeprefix("text_model_")


def _layers_of(part: torch.nn.Module) -> dict[str, tuple[Target, ...]]:
    """Return the modules of a part by all names of layers."""
    modules = {name: module for name, module in part.named_modules() if hasattr(module, "weight")}
    found: dict[str, tuple[Target, ...]] = {_key(name): (Target(name),) for name in modules}
    for name in modules:
        if name.endswith(".to_out.0"):
            found.setdefault(_key(name.removesuffix(".0")), (Target(name),))
    for author, names in authors_layers(type(part).__name__, tuple(modules)):
        found.setdefault(_key(author), _split(part, names))
    return found


def _split(part: torch.nn.Module, names: tuple[str, ...]) -> tuple[Target, ...]:
    """Return the modules of one author's layer, whose outputs are the modules', one after the other."""
    if len(names) == 1:
        (name,) = names
        if type(part.get_submodule(name.rpartition(".")[0])).__name__ != "AdaLayerNormContinuous":
            return (Target(name),)
        num_rows = num_outputs(part.get_submodule(name))  # shift and scale are the other way round there
        return (Target(name, ((num_rows // 2, num_rows), (0, num_rows // 2))),)
    targets, first = [], 0
    for name in names:
        num_rows = num_outputs(part.get_submodule(name))
        targets.append(Target(name, ((first, first + num_rows),)))
        first += num_rows
    return tuple(targets)


def num_outputs(module: torch.nn.Module) -> int:
    """Return the outputs of a layer, or the numbers of a norm's weight."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features  # a quantized weight has another shape
    assert isinstance(module.weight, torch.Tensor)
    return len(module.weight)
