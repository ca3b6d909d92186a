"""Applies a different set of LoRA adapters to each row of a call, in one batch.

What an adapter adds to a layer is (input · down) · up. For a batch, the matrices of its L distinct sets of adapters are
stacked, of several adapters in a set the ranks are joined, and two batched products take each row's by its index. Hooks
add the result behind the layers; the model itself stays as it is. Rows without an adapter are not touched at all, so
they are equal in every bit to those of the bare model; and without adapters in the batch no hook does anything.

Sets are stacked by padded rank, so that a large one makes no other large. Stacks are kept while the sets in them are
held by requests, whichever rows have them at a call.

Shapes: R rows of a call, A rows of them with adapters, L sets of adapters in a stack, r their padded joined rank.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from noria.engine.diffusion.loras.lora_cache import Adapters, AdaptersKey, padded_rank
from noria.models.diffusion.lora_file import LoraLayer

_MAX_RUNS = 2  # of a guided batch, whose rows with and without a prompt are apart


class _Rows(NamedTuple):
    """Rows of a call that have adapters of one stack."""

    at: slice | torch.Tensor  # a slice where they follow one another: then nothing is copied
    positions_A: torch.Tensor | None  # which set of the stack each row has; None: all have the only one
    num_rows: int

    def of_set(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the matrices of each row, [A, …] of [L, …]."""
        if self.positions_A is None:
            return matrices.expand(self.num_rows, *matrices.shape[1:])
        return matrices[self.positions_A]


class LoraRows:
    """The adapters of the rows of the calls of one part of a model."""

    def __init__(self, name: str, part: torch.nn.Module) -> None:
        """`name` is that of the part in `LoraWeights.layers`."""
        self._name, self._part = name, part
        self._held: weakref.WeakValueDictionary[AdaptersKey, Adapters] = weakref.WeakValueDictionary()
        self._stacked: tuple[AdaptersKey, ...] = ()  # the sets of which the hooks are
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._rows: list[AdaptersKey] = []  # of the call
        self._rows_of: dict[tuple[AdaptersKey, ...], list[_Rows]] = {}
        self._is_active = False

    @contextlib.contextmanager
    def applied(self, rows: Sequence[Adapters]) -> Iterator[None]:
        """Apply `rows[k]` to row k of the calls of the part inside of this context."""
        self._set_rows(rows)
        self._is_active = any(self._rows)
        try:
            yield
        finally:
            self._is_active = False

    def clear(self) -> None:
        """Release all stacks."""
        for hook in self._hooks:
            hook.remove()
        self._stacked, self._hooks, self._rows, self._rows_of = (), [], [], {}

    def _set_rows(self, rows: Sequence[Adapters]) -> None:
        keys = [adapters.of_part(self._name) for adapters in rows]
        self._held.update({key: adapters for key, adapters in zip(keys, rows, strict=True) if key})
        wanted = {key for key in keys if key}
        held = dict(self._held)  # another thread may release one
        if not wanted.issubset(self._stacked) or any(key not in held for key in self._stacked):
            kept = sorted(key for key in held if key in wanted or key in self._stacked)
            self.clear()  # freed before the next ones need memory
            try:
                self._stack({key: held[key] for key in kept})
            except BaseException:  # else the layers before would have adapters
                self.clear()
                raise
        if keys != self._rows:
            self._rows, self._rows_of = keys, {}

    def _stack(self, sets: Mapping[AdaptersKey, Adapters]) -> None:
        modules = {
            name for adapters in sets.values() for each in adapters for name in each.weights.layers.get(self._name, ())
        }
        for name in sorted(modules):
            joined: dict[int, dict[AdaptersKey, LoraLayer]] = {}  # by padded rank
            for key, adapters in sets.items():
                if (layer := self._join(adapters, name)) is not None:
                    joined.setdefault(padded_rank(len(layer.down)), {})[key] = layer
            stacks = [_stack(rank, layers) for rank, layers in joined.items()]
            self._hooks.append(self._part.get_submodule(name).register_forward_hook(_LayerHook(self, stacks)))
        self._stacked = tuple(sets)

    def _join(self, adapters: Adapters, module: str) -> LoraLayer | None:
        """Return the adapters of one set as one of the sum of their ranks; None: none changes this layer."""
        found = [(each.weights.layers.get(self._name, {}).get(module), each.weight) for each in adapters]
        layers = [(layer, weight) for layer, weight in found if layer is not None]
        if not layers:
            return None
        down = torch.cat([layer.down for layer, _ in layers])
        return LoraLayer(down, torch.cat([layer.up * weight for layer, weight in layers], dim=1))

    @property
    def is_active(self) -> bool:
        """Whether a call with adapters inside of `applied` runs; all others of the part are the bare model's."""
        return self._is_active

    @property
    def num_rows(self) -> int:
        """The rows of the call."""
        return len(self._rows)

    def rows_of(self, keys: tuple[AdaptersKey, ...]) -> list[_Rows]:
        """Return the rows that have one of these sets, in at most two runs of rows that follow one another, or in one.

        The list is empty if no row has one.
        """
        if keys not in self._rows_of:
            self._rows_of[keys] = self._find_rows(keys)
        return self._rows_of[keys]

    def _find_rows(self, keys: tuple[AdaptersKey, ...]) -> list[_Rows]:
        found = [row for row, key in enumerate(self._rows) if key in keys]
        runs: list[list[int]] = []
        for row in found:
            if runs and runs[-1][-1] == row - 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        if len(runs) > _MAX_RUNS:
            return [_Rows(self._to_device(found), self._positions(found, keys), len(found))]
        return [_Rows(slice(run[0], run[-1] + 1), self._positions(run, keys), len(run)) for run in runs]

    def _positions(self, rows: list[int], keys: tuple[AdaptersKey, ...]) -> torch.Tensor | None:
        return self._to_device([keys.index(self._rows[row]) for row in rows]) if len(keys) > 1 else None

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=next(self._part.parameters()).device)


class _Stack(NamedTuple):
    """Matrices of one layer: those of set `keys[k]` are number k."""

    keys: tuple[AdaptersKey, ...]
    down: torch.Tensor  # [L, r, in] or, of a convolution, [L, r, in, h, w]
    up: torch.Tensor  # [L, out, r]


def _stack(rank: int, layers: dict[AdaptersKey, LoraLayer]) -> _Stack:
    return _Stack(
        tuple(layers),
        torch.stack([_pad(layer.down, rank, dim=0) for layer in layers.values()]),
        torch.stack([_pad(layer.up, rank, dim=1) for layer in layers.values()]),
    )


class _LayerHook:
    """Adds the adapters of rows to the output of one layer."""

    def __init__(self, owner: LoraRows, stacks: list[_Stack]) -> None:
        self._owner, self._stacks = owner, stacks

    def __call__(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not self._owner.is_active:
            return
        inputs, num_rows = args[0], self._owner.num_rows
        if len(inputs) != num_rows:  # each row is several here, in order
            assert len(inputs) % num_rows == 0, "a layer that merges rows cannot have adapters by row"
            inputs, output = (each.view(num_rows, -1, each.shape[-1]) for each in (inputs, output))
        add = _add_convolved if isinstance(module, torch.nn.Conv2d) else _add_product
        for stack in self._stacks:
            for rows in self._owner.rows_of(stack.keys):
                changed = output[rows.at]
                add(module, inputs[rows.at], rows.of_set(stack.down), rows.of_set(stack.up), changed)
                if isinstance(rows.at, torch.Tensor):  # else it is a part of the output itself
                    output.index_copy_(0, rows.at, changed)


def _add_product(
    _module: torch.nn.Module, inputs: torch.Tensor, down_ArI: torch.Tensor, up_AOr: torch.Tensor, output: torch.Tensor
) -> None:
    """Add what the adapters of A rows change in a linear layer to its output [A, …, out], in place."""
    reduced_ATr = torch.bmm(inputs.flatten(1, -2) if inputs.ndim > 2 else inputs[:, None], down_ArI.mT)
    output.view(len(output), -1, output.shape[-1]).baddbmm_(reduced_ATr, up_AOr.mT)


def _add_convolved(
    module: torch.nn.Module,
    inputs_AIHW: torch.Tensor,
    down_ArIhw: torch.Tensor,
    up_AOr: torch.Tensor,
    output_AOHW: torch.Tensor,
) -> None:
    """Add what the adapters of A rows change in a convolution to its output, in place."""
    assert isinstance(module, torch.nn.Conv2d)
    output_AOHW += torch.bmm(up_AOr, _reduce(module, inputs_AIHW, down_ArIhw)).view(output_AOHW.shape)


def _reduce(module: torch.nn.Conv2d, inputs_AIHW: torch.Tensor, down_ArIhw: torch.Tensor) -> torch.Tensor:
    """Return [A, r, height × width]: each row convolved with its own matrix, as one convolution in A groups."""
    num_rows, rank = down_ArIhw.shape[:2]
    if module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding == (0, 0):
        return torch.bmm(down_ArIhw.flatten(2), inputs_AIHW.flatten(2))
    reduced = torch.nn.functional.conv2d(
        inputs_AIHW.reshape(1, -1, *inputs_AIHW.shape[2:]),
        down_ArIhw.flatten(0, 1),
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=num_rows,
    )
    return reduced.view(num_rows, rank, -1)


def _pad(matrix: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """Append zeros up to `rank`."""
    missing = rank - matrix.shape[dim]
    if not missing:
        return matrix
    shape = list(matrix.shape)
    shape[dim] = missing
    return torch.cat([matrix, matrix.new_zeros(shape)], dim=dim)
