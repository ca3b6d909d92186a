"""Applies a different set of LoRA adapters to each row of a call, in one batch.

What an adapter adds to a layer is (input · down) · up. For a batch, the matrices of its L distinct sets of adapters are
stacked, of several adapters in a set the ranks are joined, and two batched products take each row's by its index. Hooks
add the result behind the layers; the model itself stays as it is. Rows without an adapter are not touched at all, so
they are equal in every bit to those of the bare model; and without adapters in the batch there is no hook.

Shapes: R rows of a call, A rows of them with adapters, L distinct sets of adapters, r their largest joined rank.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from noria.engine.diffusion.lora_cache import Adapters
from noria.models.diffusion.lora_file import LoraLayer


class LoraRows:
    """The adapters of the rows of the calls of one part of a model."""

    def __init__(self, name: str, part: torch.nn.Module) -> None:
        """`name` is that of the part in `LoraWeights.layers`."""
        self._name, self._part = name, part
        self._rows: tuple[tuple[Any, ...], ...] = ()  # of which the hooks are
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_active = False

    @contextlib.contextmanager
    def applied(self, rows: Sequence[Adapters]) -> Iterator[None]:
        """Apply `rows[k]` to row k of the calls of the part inside of this context.

        What is stacked for these rows is kept until others are applied.
        """
        self._set_rows([tuple(each for each in row if self._name in each.weights.layers) for row in rows])
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    def clear(self) -> None:
        """Release what is kept of the last rows."""
        for hook in self._hooks:
            hook.remove()
        self._rows, self._hooks = (), []

    def _set_rows(self, rows: list[Adapters]) -> None:
        keys = tuple(tuple((each.digest, each.weight) for each in row) for row in rows) if any(rows) else ()
        if keys == self._rows:
            return
        self.clear()  # freed before the next ones need memory
        adapted = [index for index, row in enumerate(rows) if row]
        sets = {keys[index]: rows[index] for index in adapted}
        positions = {key: position for position, key in enumerate(sets)}
        modules = {name for row in sets.values() for each in row for name in each.weights.layers[self._name]}
        for name in sorted(modules):
            joined = [self._join(row, name) for row in sets.values()]
            # Rows whose adapters do not change this layer stay as they are, as those without adapters.
            indices = [index for index in adapted if joined[positions[keys[index]]] is not None]
            used = {
                position: number for number, position in enumerate(p for p, j in enumerate(joined) if j is not None)
            }
            hook = _LayerHook(
                self,
                [each for each in joined if each is not None],
                indices,
                [used[positions[keys[index]]] for index in indices],
                len(rows),
            )
            self._hooks.append(self._part.get_submodule(name).register_forward_hook(hook))
        self._rows = keys

    def _join(self, row: Adapters, module: str) -> LoraLayer | None:
        """Return the adapters of one row as one of the sum of their ranks."""
        found = [(each.weights.layers[self._name].get(module), each.weight) for each in row]
        layers = [(layer, weight) for layer, weight in found if layer is not None]
        if not layers:
            return None
        down = torch.cat([layer.down for layer, _ in layers])
        return LoraLayer(down, torch.cat([layer.up * weight for layer, weight in layers], dim=1))

    @property
    def is_active(self) -> bool:
        """Whether a call inside of `applied` runs; others of the same part are the bare model's."""
        return self._is_active


class _LayerHook:
    """Adds the adapters of rows to the output of one layer."""

    def __init__(
        self, owner: LoraRows, layers: list[LoraLayer], indices: list[int], positions: list[int], num_rows: int
    ) -> None:
        """Row `indices[k]` of `num_rows` gets `layers[positions[k]]`."""
        self._owner, self._num_rows = owner, num_rows
        rank, device = max(len(layer.down) for layer in layers), layers[0].down.device
        self._down = torch.stack([_pad(layer.down, rank, dim=0) for layer in layers])  # [L, r, in] or [L, r, in, h, w]
        self._up = torch.stack([_pad(layer.up, rank, dim=1) for layer in layers])  # [L, out, r]
        self._indices_A = torch.tensor(indices, device=device)
        self._positions_A = torch.tensor(positions, device=device)

    def __call__(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not self._owner.is_active:
            return
        inputs = args[0]
        assert len(inputs) == self._num_rows, "a layer that merges or splits rows cannot have adapters by row"
        inputs, down, up = inputs[self._indices_A], self._down[self._positions_A], self._up[self._positions_A]
        if isinstance(module, torch.nn.Conv2d):
            change = _convolve(module, inputs, down, up)
        else:
            change = torch.bmm(torch.bmm(inputs.flatten(1, -2) if inputs.ndim > 2 else inputs[:, None], down.mT), up.mT)
        output.index_add_(0, self._indices_A, change.view(len(inputs), *output.shape[1:]))


def _convolve(
    module: torch.nn.Conv2d, inputs_AIHW: torch.Tensor, down_ArIhw: torch.Tensor, up_AOr: torch.Tensor
) -> torch.Tensor:
    """Return [A, out, height × width]: each row convolved with its own matrix, as one convolution in A groups."""
    num_rows, rank = down_ArIhw.shape[:2]
    if module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding == (0, 0):
        return torch.bmm(up_AOr, torch.bmm(down_ArIhw.flatten(2), inputs_AIHW.flatten(2)))
    reduced = torch.nn.functional.conv2d(
        inputs_AIHW.reshape(1, -1, *inputs_AIHW.shape[2:]),
        down_ArIhw.flatten(0, 1),
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=num_rows,
    )
    return torch.bmm(up_AOr, reduced.view(num_rows, rank, -1))


def _pad(matrix: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """Append zeros up to `rank`."""
    missing = rank - matrix.shape[dim]
    if not missing:
        return matrix
    shape = list(matrix.shape)
    shape[dim] = missing
    return torch.cat([matrix, matrix.new_zeros(shape)], dim=dim)
