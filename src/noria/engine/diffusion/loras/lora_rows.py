"""Applies a different set of adapters to each row of a call, in one batch.

An adapter adds to a layer's output up · down · x, the product of x with a Kronecker product, or vectors; DoRA along the
inputs changes x itself. For a batch, the tensors of its L distinct sets of adapters are stacked, of several adapters in
a set the ranks are joined and the vectors added, and each row takes those of its set by an index. Hooks change what
goes into the layers and what comes out; the model itself stays as it is. Rows without an adapter are not touched at
all, so they are equal in every bit to those of the bare model; and without adapters in the batch no hook does anything.

A kernel's result may differ in the last bit with its number of rows. Where calls are padded to one number, so that
images are equal in every bit whatever else runs, the additions are made for all rows of a call with adapters, from
tensors that are gathered by row, and those of rows without an adapter are dropped.

Sets are stacked by the shapes of their tensors, ranks padded, so that a large one makes no other large. Stacks are kept
while the sets in them are held by requests, whichever rows have them at a call.

Shapes: R rows of a call, A rows of them with adapters, L sets of adapters in a stack, r their padded joined rank; I and
O a layer's inputs and outputs; of a Kronecker product a · b ≥ O and c · d = I.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch

from noria.engine.diffusion.loras.layer_hook import LayerHook, Rows
from noria.engine.diffusion.loras.lora_cache import Adapters, AdaptersKey
from noria.models.diffusion.block_compilation import compiled_modules

_MAX_RUNS = 2  # runs of rows in a guided batch, whose rows with and without a prompt are apart


class LoraRows:
    """The adapters of the rows of the calls of one part of a model."""

    def __init__(self, name: str, part: torch.nn.Module, *, for_all_rows: bool = False) -> None:
        """`name` is that of the part in `LoraWeights.layers`.

        With `for_all_rows`, a row's bits do not depend on which other rows have adapters.
        """
        self._name, self._part, self._for_all_rows = name, part, for_all_rows
        self._held: weakref.WeakValueDictionary[AdaptersKey, Adapters] = weakref.WeakValueDictionary()
        self._stacked: tuple[AdaptersKey, ...] = ()  # the sets of which the hooks are
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._compiled = compiled_modules(part)
        self._uncompiled: set[AdaptersKey] = set()  # the sets of which compiled blocks would leave out something
        self._rows: list[AdaptersKey] = []  # the adapters of each row of the call
        self._rows_of: dict[tuple[AdaptersKey, ...], list[Rows]] = {}
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
        self._uncompiled.clear()

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
        found = {key: [(each.weights.layers.get(self._name, {}), each.weight) for each in sets[key]] for key in sets}
        for name in sorted({name for adapters in found.values() for layers, _ in adapters for name in layers}):
            module = self._part.get_submodule(name)
            of_layer = {
                key: [layers[name].at(weight) for layers, weight in adapters if name in layers]
                for key, adapters in found.items()
            }
            hook = LayerHook(self, module, {key: layers for key, layers in of_layer.items() if layers})
            self._hooks += hook.register(module)
            if module in self._compiled and not hook.runs_in_compiled(module):
                self._uncompiled |= {key for key, layers in of_layer.items() if layers}
        self._stacked = tuple(sets)

    @property
    def is_active(self) -> bool:
        """Whether a call with adapters inside of `applied` runs; all others of the part are the bare model's."""
        return self._is_active

    @property
    def run_in_compiled(self) -> bool:
        """Whether compiled blocks add all that the adapters of this call add to them."""
        return self._uncompiled.isdisjoint(self._rows)

    @property
    def num_rows(self) -> int:
        """The rows of the call."""
        return len(self._rows)

    def rows_of(self, keys: tuple[AdaptersKey, ...]) -> list[Rows]:
        """Return the rows that have one of these sets, in at most two runs of rows that follow one another, or in one.

        With `for_all_rows`, these are all rows.

        The list is empty if no row has one.
        """
        if keys not in self._rows_of:
            self._rows_of[keys] = self._find_rows(keys)
        return self._rows_of[keys]

    def _find_rows(self, keys: tuple[AdaptersKey, ...]) -> list[Rows]:
        found = [row for row, key in enumerate(self._rows) if key in keys]
        if found and self._for_all_rows:
            adapted = None if len(found) == self.num_rows else self._to_device(found)
            positions = [keys.index(key) if key in keys else 0 for key in self._rows]
            return [Rows(slice(None), self._to_device(positions), self.num_rows, adapted)]
        runs: list[list[int]] = []
        for row in found:
            if runs and runs[-1][-1] == row - 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        if len(runs) > _MAX_RUNS:
            return [Rows(self._to_device(found), self._positions(found, keys), len(found))]
        return [Rows(slice(run[0], run[-1] + 1), self._positions(run, keys), len(run)) for run in runs]

    def _positions(self, rows: list[int], keys: tuple[AdaptersKey, ...]) -> torch.Tensor | None:
        return self._to_device([keys.index(self._rows[row]) for row in rows]) if len(keys) > 1 else None

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=next(self._part.parameters()).device)
