"""The additions of an adapter to the layers of a model, in the forms in which a running batch applies it.

Shapes: in and out the layer's features or channels, h × w the window of a convolution, r the rank; a · b = out of the
file's layer, c · d = in.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

_LINEAR = {"up", "left", "bias", "output_gain", "input_gain", "norm_weight"}
"""The tensors that a strength multiplies."""


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """The addition to one linear or convolutional layer, or to a norm, at strength 1. None: there is nothing of it.

    The layer's output becomes base + up · down · x + row_scale ∘ (left ⊗ right) · (column_scale ∘ x) + bias +
    output_gain ∘ (base - the layer's bias), where base is of the input x + input_gain ∘ x. A norm is itself, with
    other weights.
    """

    down: torch.Tensor | None = None  # [r, in] or [r, in, h, w]
    up: torch.Tensor | None = None  # [out, r], with the file's scale in it
    left: torch.Tensor | None = None  # [a, c]
    right: torch.Tensor | None = None  # [b, d] or [b, d, h, w], with the file's scale in it
    first_row: int = 0  # the first of the rows of left ⊗ right that are this layer's
    row_scale: torch.Tensor | None = None  # [out]
    column_scale: torch.Tensor | None = None  # [in]
    bias: torch.Tensor | None = None  # [out]
    output_gain: torch.Tensor | None = None  # [out]: DoRA's, magnitude / norm of the row - 1
    input_gain: torch.Tensor | None = None  # [in]: DoRA's along the inputs, magnitude / norm of the column - 1
    magnitude: torch.Tensor | None = None  # [out] of peft's DoRA, whose gain depends on the strength
    squared_norms: torch.Tensor | None = None  # [3, out]: ‖row‖² of W + strength · change, as a polynomial of strength
    norm_weight: torch.Tensor | None = None  # added to the weight of a norm

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def rank(self) -> int:
        """Rank of the two matrices; 0: there are none."""
        return 0 if self.down is None else len(self.down)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "LoraLayer":
        """Return it with others of these names."""
        fields: Mapping[str, Any] = tensors
        return replace(self, **fields)

    def to(self, device: torch.device) -> "LoraLayer":
        """Return it on a device."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def at(self, strength: float) -> "LoraLayer":
        """Return what it adds at a strength, by the convention of the file's writer.

        ComfyUI, A1111 and kohya: W + strength · (W' - W). peft's DoRA: magnitude · (W + strength · up · down) over its
        norm.
        """
        if self.magnitude is None or self.squared_norms is None or self.up is None:
            return self.with_tensors({name: self.tensors[name] * strength for name in _LINEAR & self.tensors.keys()})
        constant, linear, quadratic = self.squared_norms
        gain = self.magnitude / (constant + strength * linear + strength**2 * quadratic).sqrt()
        bias = None if self.bias is None else strength * self.bias
        up = (strength * gain[:, None] * self.up).to(self.up.dtype)
        return LoraLayer(self.down, up, bias=bias, output_gain=(gain - 1).to(up.dtype))


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """An adapter, on the device and in the precision of its model."""

    layers: Mapping[str, Mapping[str, LoraLayer]]  # by the model's part and the part's module

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for part in self.layers.values() for each in part.values())

    def to(self, devices: Mapping[str, torch.device]) -> "LoraWeights":
        """Return it with the layers of each part on that part's device."""
        return LoraWeights(
            {
                part: {name: each.to(devices[part]) for name, each in layers.items()}
                for part, layers in self.layers.items()
            }
        )
