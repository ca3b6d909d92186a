"""The hooks of one layer, which add to its outputs what the adapters of each row do, and scale its inputs.

Shapes: R rows of a call, A rows of them with adapters, L sets of adapters in a stack, r their padded joined rank; I and
O a layer's inputs and outputs, T its tokens; of a Kronecker product a · b ≥ O and c · d = I.
"""

import copy
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from noria.engine.diffusion.loras.lora_cache import AdaptersKey, padded_rank
from noria.models.diffusion.block_compilation import add_row_hook, is_hooked
from noria.models.diffusion.loras.lora_layer import LoraLayer
from noria.models.diffusion.weight_streaming import stored_value


class Rows(NamedTuple):
    """Rows of a call that have adapters of one stack, or all rows of a call in which some have."""

    at: slice | torch.Tensor  # a slice where they follow one another: then nothing is copied
    positions_A: torch.Tensor | None  # which set of the stack each row has; None: all have the only one
    num_rows: int
    adapted: torch.Tensor | None = None  # which of all rows have adapters; None: all of these

    def of_set(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each row, [A, …] of [L, …]."""
        if self.positions_A is None:
            return tensor.expand(self.num_rows, *tensor.shape[1:])
        return tensor[self.positions_A]


class Call(Protocol):
    """The rows of the call that runs."""

    @property
    def is_active(self) -> bool:
        """Whether a call with adapters runs."""

    @property
    def num_rows(self) -> int:
        """The rows of the call."""

    def rows_of(self, keys: tuple[AdaptersKey, ...]) -> list[Rows]:
        """Return the rows that have one of these sets."""


_Apply = Callable[..., None]
"""Changes the last one of the layer, inputs [A, …] and outputs [A, …], by the tensors of each row, [A, …]."""


class _Stack(NamedTuple):
    """Tensors of one layer: those of set `keys[k]` are number k, [L, …]."""

    keys: tuple[AdaptersKey, ...]
    apply: _Apply
    tensors: Sequence[torch.Tensor]


class LayerHook:
    """Changes the inputs and outputs of one layer, for the rows with adapters."""

    def __init__(self, call: Call, module: torch.nn.Module, sets: Mapping[AdaptersKey, Sequence[LoraLayer]]) -> None:
        """`sets` are what the adapters of each set add to `module`, at their strengths."""
        self._call = call
        self._before = _stack(_input_gains, module, sets)
        # Vectors come first: they scale the output of the bare layer.
        self._after = [
            stack for find in (_vectors, _matrices, _kronecker_products, _norm) for stack in _stack(find, module, sets)
        ]
        self._inputs: torch.Tensor | None = None  # those of the call that runs, if `before` has changed them

    def runs_in_compiled(self, module: torch.nn.Module) -> bool:
        """Return whether compiled code that has `module` runs all of what this does."""
        return is_hooked(module) and not self._before

    def register(self, module: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Add the hooks to `module`."""
        if self.runs_in_compiled(module):
            return [add_row_hook(module, self)]
        handles = [module.register_forward_hook(self)]
        return [*handles, module.register_forward_pre_hook(self.before)] if self._before else handles

    def before(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Return the inputs, scaled in the rows whose adapters do so; None: no row's do."""
        self._inputs = None
        if torch.compiler.is_dynamo_compiling():
            return None
        if not (self._call.is_active and any(self._call.rows_of(stack.keys) for stack in self._before)):
            return None
        self._inputs, changed = args[0], args[0].clone()
        self._apply(self._before, module, changed, changed)
        return changed, *args[1:]

    def __call__(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add to the output, in place."""
        if torch.compiler.is_dynamo_compiling():
            return
        inputs, self._inputs = args[0] if self._inputs is None else self._inputs, None
        if self._call.is_active:
            self._apply(self._after, module, inputs, output)

    def _apply(
        self, stacks: Sequence[_Stack], module: torch.nn.Module, inputs: torch.Tensor, changed: torch.Tensor
    ) -> None:
        num_rows = self._call.num_rows
        if len(inputs) != num_rows:  # each row is several here, in order
            assert len(inputs) % num_rows == 0, "a layer that merges rows cannot have adapters by row"
            inputs, changed = (each.view(num_rows, -1, each.shape[-1]) for each in (inputs, changed))
        inputs = inputs.to(changed.dtype)  # a quantized layer's weight does not tell it before the call
        for stack in stacks:
            for rows in self._call.rows_of(stack.keys):
                of_rows = changed[rows.at] if rows.adapted is None else changed.clone()
                tensors = (rows.of_set(each).to(changed.dtype) for each in stack.tensors)
                stack.apply(module, inputs[rows.at], of_rows, *tensors)
                if rows.adapted is not None:
                    changed.index_copy_(0, rows.adapted, of_rows[rows.adapted])
                elif isinstance(rows.at, torch.Tensor):  # else it is a part of the tensor itself
                    changed.index_copy_(0, rows.at, of_rows)


_Found = Iterator[tuple[_Apply, list[torch.Tensor]]]
_Find = Callable[[torch.nn.Module, Sequence[LoraLayer]], _Found]


def _stack(find: _Find, module: torch.nn.Module, sets: Mapping[AdaptersKey, Sequence[LoraLayer]]) -> list[_Stack]:
    """Return the stacks of what `find` yields for each set; tensors of the same shapes are in one."""
    alike: dict[tuple[Hashable, ...], dict[AdaptersKey, list[torch.Tensor]]] = {}
    applied: dict[tuple[Hashable, ...], _Apply] = {}
    for key, layers in sets.items():
        for number, (apply, tensors) in enumerate(find(module, layers)):
            form = (apply, number, *(tensor.shape for tensor in tensors))
            applied[form] = apply
            alike.setdefault(form, {})[key] = tensors
    return [
        _Stack(tuple(of_sets), applied[form], [torch.stack(each) for each in zip(*of_sets.values(), strict=True)])
        for form, of_sets in alike.items()
    ]


def _given(layers: Sequence[LoraLayer], name: str) -> list[torch.Tensor]:
    return [layer.tensors[name] for layer in layers if name in layer.tensors]


def _sum(layers: Sequence[LoraLayer], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of the vectors of this name in the form of `like`; zeros if there are none."""
    return functools.reduce(operator.add, _given(layers, name), torch.zeros_like(like))


def _input_gains(_module: torch.nn.Module, layers: Sequence[LoraLayer]) -> _Found:
    if gains := _given(layers, "input_gain"):
        yield _scale_inputs, [functools.reduce(operator.add, gains)]


def _vectors(module: torch.nn.Module, layers: Sequence[LoraLayer]) -> _Found:
    found = _given(layers, "output_gain") + _given(layers, "bias")
    if found and not _is_norm(module):
        gain, bias = (_sum(layers, name, found[0]) for name in ("output_gain", "bias"))
        if isinstance(module.bias, torch.Tensor):  # a gain is of the product of matrix and input alone
            bias = (bias - gain * stored_value(module.bias).to(gain.device)).to(gain.dtype)
        yield _add_vectors_of_bare if _given(layers, "input_gain") else _add_vectors, [gain, bias]


def _matrices(_module: torch.nn.Module, layers: Sequence[LoraLayer]) -> _Found:
    if downs := _given(layers, "down"):
        down, up = torch.cat(downs), torch.cat(_given(layers, "up"), dim=1)
        rank = padded_rank(len(down))
        apply = _add_product if down.ndim == 2 else _add_convolved
        yield apply, [_pad(down, rank, dim=0), _pad(up, rank, dim=1)]


def _kronecker_products(_module: torch.nn.Module, layers: Sequence[LoraLayer]) -> _Found:
    for layer in layers:
        if layer.left is not None:
            names = [name for name in ("left", "right", "row_scale", "column_scale") if name in layer.tensors]
            yield _AddKronecker(tuple(names), layer.first_row), [layer.tensors[name] for name in names]


def _norm(module: torch.nn.Module, layers: Sequence[LoraLayer]) -> _Found:
    if _is_norm(module):
        like = (_given(layers, "norm_weight") + _given(layers, "bias"))[0]
        yield _add_norm, [_sum(layers, name, like) for name in ("norm_weight", "bias")]


def _is_norm(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.Linear | torch.nn.Conv2d)


def _spread(vector_AO: torch.Tensor, like: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Return one number for each channel of a row in the dimensions of `like`, [A, …]."""
    channels_are_second = isinstance(module, torch.nn.Conv2d | torch.nn.GroupNorm)
    ones = [1] * (like.ndim - 2)
    return vector_AO.view(len(vector_AO), *([-1, *ones] if channels_are_second else [*ones, -1]))


def _scale_inputs(module: torch.nn.Module, _inputs: torch.Tensor, changed: torch.Tensor, gain_AI: torch.Tensor) -> None:
    changed.addcmul_(changed, _spread(gain_AI, changed, module))


def _add_vectors(
    module: torch.nn.Module, _inputs: torch.Tensor, output: torch.Tensor, gain_AO: torch.Tensor, bias_AO: torch.Tensor
) -> None:
    output.addcmul_(output, _spread(gain_AO, output, module)).add_(_spread(bias_AO, output, module))


def _add_vectors_of_bare(
    module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor, gain_AO: torch.Tensor, bias_AO: torch.Tensor
) -> None:
    """Scale the output of the bare layer, where that of the call is of inputs that other adapters have scaled."""
    bare = module.forward(inputs)  # without hooks
    output.addcmul_(bare, _spread(gain_AO, output, module)).add_(_spread(bias_AO, output, module))


def _add_product(
    _module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor, down_ArI: torch.Tensor, up_AOr: torch.Tensor
) -> None:
    """Add the product with two matrices to the output [A, …, O] of a linear layer."""
    reduced_ATr = torch.bmm(_tokens(inputs), down_ArI.mT)
    output.view(len(output), -1, output.shape[-1]).baddbmm_(reduced_ATr, up_AOr.mT)


def _tokens(inputs: torch.Tensor) -> torch.Tensor:
    """Return [A, T, I] of [A, …, I]."""
    return inputs.flatten(1, -2) if inputs.ndim > 2 else inputs[:, None]


def _add_convolved(
    module: torch.nn.Conv2d,
    inputs_AIHW: torch.Tensor,
    output_AOHW: torch.Tensor,
    down_ArIhw: torch.Tensor,
    up_AOr: torch.Tensor,
) -> None:
    """Add the product with two matrices, of which the first is a convolution, to the output of one."""
    if module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding == (0, 0):
        reduced_ArN = torch.bmm(down_ArIhw.flatten(2), inputs_AIHW.flatten(2))
    else:
        reduced_ArN = _convolve(module, inputs_AIHW[None], down_ArIhw)[0].flatten(2)
    output_AOHW += torch.bmm(up_AOr, reduced_ArN).view(output_AOHW.shape)


def _convolve(module: torch.nn.Conv2d, inputs_NAIHW: torch.Tensor, weights_AOIhw: torch.Tensor) -> torch.Tensor:
    """Return [N, A, O, height, width]: N images of each row convolved with its own weights, in A groups."""
    num_rows, num_outputs = weights_AOIhw.shape[:2]
    outputs = torch.nn.functional.conv2d(
        inputs_NAIHW.flatten(1, 2),
        weights_AOIhw.flatten(0, 1),
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=num_rows,
    )
    return outputs.view(len(outputs), num_rows, num_outputs, *outputs.shape[2:])


@dataclass(frozen=True)
class _AddKronecker:
    """Adds the product with left ⊗ right, from `first_row` on: of a token, left · x · rightᵀ, where x is [c, d]."""

    names: tuple[str, ...]  # those of the tensors
    first_row: int

    def __call__(
        self, module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor, *tensors: torch.Tensor
    ) -> None:
        """Add to the output of a linear layer or a convolution."""
        given = dict(zip(self.names, tensors, strict=True))
        if "column_scale" in given:
            inputs = inputs * _spread(given["column_scale"], inputs, module)
        if isinstance(module, torch.nn.Conv2d):
            product = _multiply_convolved(module, inputs, given["left"], given["right"])
        else:
            product = _multiply(inputs, given["left"], given["right"])
        dim, num_rows = (1, output.shape[1]) if isinstance(module, torch.nn.Conv2d) else (-1, output.shape[-1])
        product = product.narrow(dim, self.first_row, num_rows).view_as(output)
        output += product * _spread(given["row_scale"], output, module) if "row_scale" in given else product


def _multiply(inputs: torch.Tensor, left_Aac: torch.Tensor, right_Abd: torch.Tensor) -> torch.Tensor:
    """Return [A, T, a · b]; the order of the two products is the cheaper one."""
    (num_rows, a, c), (b, d) = left_Aac.shape, right_Abd.shape[1:]
    x_ATcd = inputs.reshape(num_rows, -1, c, d)
    num_tokens = x_ATcd.shape[1]
    if c * b * (d + a) <= a * d * (c + b):
        reduced_ATcb = torch.bmm(x_ATcd.flatten(1, 2), right_Abd.mT).view(num_rows, num_tokens, c, b)
        product = torch.bmm(left_Aac, reduced_ATcb.transpose(1, 2).flatten(2))
    else:
        mixed = torch.bmm(left_Aac, x_ATcd.transpose(1, 2).flatten(2))
        product = torch.bmm(mixed.view(num_rows, a * num_tokens, d), right_Abd.mT)
    return product.view(num_rows, a, num_tokens, b).transpose(1, 2).flatten(2)


def _multiply_convolved(
    module: torch.nn.Conv2d, inputs_AIHW: torch.Tensor, left_Aac: torch.Tensor, right_Abdhw: torch.Tensor
) -> torch.Tensor:
    """Return [A, a · b, height, width]: c images of d channels convolved with `right`, then mixed by `left`."""
    num_rows, a, c = left_Aac.shape
    images_AcdHW = inputs_AIHW.reshape(num_rows, c, -1, *inputs_AIHW.shape[2:])
    convolved_AcbHW = _convolve(module, images_AcdHW.transpose(0, 1), right_Abdhw).transpose(0, 1)
    b, *size = convolved_AcbHW.shape[2:]
    return torch.bmm(left_Aac, convolved_AcbHW.flatten(2)).view(num_rows, a * b, *size)


def _add_norm(
    module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor, weight_AO: torch.Tensor, bias_AO: torch.Tensor
) -> None:
    """Make the output that of a norm with these added to its weight and bias, of which it is a linear function."""
    normal = _with_weight(module, 1.0).forward(inputs) - _with_weight(module, 0.0).forward(inputs)
    output.addcmul_(normal, _spread(weight_AO, output, module)).add_(_spread(bias_AO, output, module))


def _with_weight(norm: torch.nn.Module, value: float) -> torch.nn.Module:
    """Return the norm with this weight everywhere, and without a bias."""
    changed = copy.copy(norm)
    changed._parameters = {
        name: torch.nn.Parameter(torch.full_like(each, value if name == "weight" else 0.0), requires_grad=False)
        for name, each in norm.named_parameters()
    } | {name: None for name, each in norm._parameters.items() if each is None}
    return changed


def _pad(matrix: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """Append zeros up to `rank`."""
    missing = rank - matrix.shape[dim]
    if not missing:
        return matrix
    shape = list(matrix.shape)
    shape[dim] = missing
    return torch.cat([matrix, matrix.new_zeros(shape)], dim=dim)
