"""Checks and describes sentence-transformers' modules Dense, which follow a pooling. Knows no torch."""

import fnmatch
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, get_args

from msgspec import Meta, Struct

from noria.errors import ModelError, short_repr
from noria.models.encoder.architectures import DENSE_PATHS
from noria.models.encoder.folders.config_files import Module
from noria.models.files.weights import REDOWNLOAD_HINT, Shapes, convert, read_object, read_weights
from noria.protocol.text import DenseActivation, DenseLayer

_ACTIVATIONS: Mapping[str, DenseActivation] = {
    f"{package}.{name}": name
    for package in ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")
    for name in get_args(DenseActivation)
}
"""By the name that sentence-transformers writes, of the class or of its module."""

_Count = Annotated[int, Meta(ge=1)]

WEIGHT, BIAS = "linear.weight", "linear.bias"
"""The names of a layer's tensors: [out_features, in_features] and [out_features]."""


class _Dense(Struct, frozen=True):
    """config.json of a Dense; defaults are the library's."""

    in_features: _Count
    out_features: _Count
    bias: bool = True
    activation_function: str = "torch.nn.Tanh"


def read_dense(folder: pathlib.Path, modules: Sequence[Module], width: int) -> tuple[tuple[DenseLayer, ...], Shapes]:
    """Return the layers among the modules after a pooling of `width` numbers, and the shapes of all their tensors.

    The last module may be a Normalize that no layer follows, which is not described.

    Raises ModelError: a file is missing or damaged, or a layer does not fit its input or its weights.
    """
    layers: list[DenseLayer] = []
    all_shapes: Shapes = {}
    normalizes_first = False
    for module in modules:
        if module.name == "Normalize":
            normalizes_first = True
            continue
        layer = _read_layer(folder, module, width, normalizes_first=normalizes_first)
        shapes = read_weights(folder, layer.path, "model")
        _check_shapes(folder / layer.path, layer, shapes)
        all_shapes |= {f"{layer.path}.{name}": shape for name, shape in shapes.items()}
        layers.append(layer)
        width, normalizes_first = layer.out_features, False
    return tuple(layers), all_shapes


def _read_layer(folder: pathlib.Path, module: Module, width: int, *, normalizes_first: bool) -> DenseLayer:
    if not fnmatch.fnmatchcase(module.path, DENSE_PATHS):
        raise ModelError(
            f"{folder / 'modules.json'}: a Dense is in {short_repr(module.path)}; supported are subfolders like "
            "2_Dense. Rename the subfolder, and its path in modules.json."
        )
    file = folder / module.path / "config.json"
    if not file.exists():
        raise ModelError(f"{file}: missing, so the Dense of modules.json is unknown. {REDOWNLOAD_HINT}")
    dense = convert(file, read_object(file), _Dense)
    if dense.in_features != width:
        raise ModelError(
            f"{file}: in_features is {dense.in_features}, but the modules before it make {width} numbers: the parts "
            f"belong to two models. {REDOWNLOAD_HINT}"
        )
    activation = _ACTIVATIONS.get(dense.activation_function)
    if activation is None:
        raise ModelError(
            f"{file}: activation_function is {short_repr(dense.activation_function)}; supported are "
            f"{', '.join(get_args(DenseActivation))} of torch.nn."
        )
    return DenseLayer(
        module.path, dense.in_features, dense.out_features, dense.bias, activation, normalizes_first=normalizes_first
    )


def _check_shapes(part: pathlib.Path, layer: DenseLayer, shapes: Shapes) -> None:
    expected: Shapes = {WEIGHT: (layer.out_features, layer.in_features)}
    if layer.has_bias:
        expected[BIAS] = (layer.out_features,)
    if shapes != expected:
        raise ModelError(
            f"{part}: the weights are {_described(shapes)}; by config.json they are {_described(expected)}. "
            f"{REDOWNLOAD_HINT}"
        )


def _described(shapes: Shapes) -> str:
    return ", ".join(f"{name[:60]} {list(shape)}" for name, shape in sorted(shapes.items())[:3]) or "none"
