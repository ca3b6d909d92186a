"""The loaded LoRA adapters of one model: bounded by bytes, the least recently used are evicted.

A prepared request holds its adapters, and what any request holds is never evicted: it stays in memory, counts, and is
found again, whether or not it is among the recently used. So nothing has to be returned, whatever ends a request. What
counts of a held set of adapters are also the matrices that `lora_rows.py` stacks for it while its images run.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from noria.engine.resources.out_of_memory import is_out_of_memory
from noria.errors import InvalidField, QueueFull
from noria.models.diffusion.loras.lora_layer import LoraWeights
from noria.protocol.diffusion import Lora

_RETRY_AFTER_S = 5.0  # an image of the usual 20 to 50 steps takes a few seconds

AdaptersKey = tuple[tuple[str, float], ...]
"""Digest and weight of each adapter."""


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter, as one request uses it."""

    digest: str
    weights: LoraWeights
    weight: float


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of one request, whose changes are added."""

    each: tuple[Adapter, ...] = ()

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self.each)

    def __bool__(self) -> bool:
        return bool(self.each)

    def of_part(self, part: str) -> AdaptersKey:
        """Return the key of those that change a part of the model."""
        return tuple((adapter.digest, adapter.weight) for adapter in self.each if part in adapter.weights.layers)

    @cached_property
    def stacked_bytes(self) -> int:
        """Bytes of the matrices that are stacked for them: ranks joined by layer, and padded to `padded_rank`."""
        ranks: dict[tuple[str, str], int] = {}
        bytes_of_rank: dict[tuple[str, str], int] = {}
        num_bytes = 0
        for adapter in self.each:
            for part, layers in adapter.weights.layers.items():
                for name, layer in layers.items():
                    num_bytes += layer.nbytes
                    if layer.down is not None and layer.up is not None:
                        of_matrices = layer.down.nbytes + layer.up.nbytes
                        num_bytes -= of_matrices
                        ranks[part, name] = ranks.get((part, name), 0) + len(layer.down)
                        bytes_of_rank[part, name] = of_matrices // len(layer.down)
        return num_bytes + sum(padded_rank(rank) * bytes_of_rank[name] for name, rank in ranks.items())


NO_ADAPTERS = Adapters()


def padded_rank(rank: int) -> int:
    """Return the rank to which matrices are padded when stacked: the next power of two."""
    return 1 << (rank - 1).bit_length()


class LoraCache:
    """At most `max_bytes` of adapters. Any thread may use it; none waits while another reads a file."""

    def __init__(self, devices: Mapping[str, torch.device], max_bytes: int) -> None:
        """`devices` are those of the model's parts."""
        self._devices, self._max_bytes = devices, max_bytes
        self._alive: weakref.WeakValueDictionary[str, LoraWeights] = weakref.WeakValueDictionary()  # by digest
        self._held: weakref.WeakValueDictionary[AdaptersKey, Adapters] = weakref.WeakValueDictionary()  # by requests
        self._recent: OrderedDict[str, LoraWeights] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters that are in memory, and of what is stacked for those that requests hold."""
        return sum(weights.nbytes for weights in list(self._alive.values())) + self._stacked_bytes

    @property
    def _stacked_bytes(self) -> int:
        return sum(adapters.stacked_bytes for adapters in list(self._held.values()))

    def has(self, loras: Sequence[Lora]) -> bool:
        """Whether all of these are loaded."""
        return all(lora.digest in self._alive for lora in loras)

    def loaded(self, digest: str, weight: float) -> Adapter:
        """Return an adapter that a request holds."""
        return Adapter(digest, self._alive[digest], weight)

    def get(self, loras: Sequence[Lora], load: Callable[[Lora], LoraWeights]) -> Adapters:
        """Return the adapters of a request; `load` reads those that are not in memory, onto the CPU.

        Raises:
            InvalidField: the adapters are too large for the cache, or `load` raises it.
            QueueFull: the adapters of other requests fill the cache, or the device's memory.
        """
        if not loras:
            return NO_ADAPTERS
        found: list[Adapter] = []
        for lora in loras:
            weights = self._find(lora) or self._add(lora, load(lora), [each.weights for each in found])
            found.append(Adapter(lora.digest or "", weights, lora.weight))
        with self._lock:
            key = tuple((adapter.digest, adapter.weight) for adapter in found)
            adapters = self._held.get(key)
            if adapters is None:
                adapters = Adapters(tuple(found))
                self._make_room(loras, adapters.stacked_bytes, [each.weights for each in found])
                self._held[key] = adapters
            return adapters

    def _find(self, lora: Lora) -> LoraWeights | None:
        with self._lock:
            weights = self._alive.get(lora.digest or "")
            return None if weights is None else self._touch(lora, weights)

    def _add(self, lora: Lora, weights: LoraWeights, needed: Collection[LoraWeights]) -> LoraWeights:
        with self._lock:
            self._make_room([lora], weights.nbytes, needed)
            try:
                return self._touch(lora, weights.to(self._devices))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise QueueFull(
                    f"the LoRA {lora.name!r} takes {weights.nbytes} bytes, more than the device's memory has now. Set "
                    "engine.lora_cache_bytes lower.",
                    retry_after_s=_RETRY_AFTER_S,
                ) from error

    def _touch(self, lora: Lora, weights: LoraWeights) -> LoraWeights:
        assert lora.digest, "requests of engines have digests"
        self._alive[lora.digest] = self._recent[lora.digest] = weights
        self._recent.move_to_end(lora.digest)
        return weights

    def _make_room(self, loras: Sequence[Lora], num_bytes: int, needed: Collection[LoraWeights]) -> None:
        """Evict until `num_bytes` more fit; `needed` are adapters of the request itself."""
        names, own_bytes = ", ".join(repr(lora.name) for lora in loras), num_bytes + _bytes_of(needed)
        if own_bytes > self._max_bytes:
            raise InvalidField(
                f"loras: {names} takes {own_bytes} bytes; engine.lora_cache_bytes allows {self._max_bytes}.",
                field="loras",
            )
        held = [adapter.weights for adapters in list(self._held.values()) for adapter in adapters]
        held_bytes = _bytes_of([*held, *needed]) + self._stacked_bytes
        if held_bytes + num_bytes > self._max_bytes:
            raise QueueFull(
                f"the LoRA adapters of accepted requests take {held_bytes} bytes; {names} takes {num_bytes} more, and "
                f"engine.lora_cache_bytes allows {self._max_bytes}",
                retry_after_s=_RETRY_AFTER_S,
            )
        while self._recent and self.num_bytes + num_bytes > self._max_bytes:
            self._recent.popitem(last=False)  # freed, unless a request holds it


def _bytes_of(weights: Collection[LoraWeights]) -> int:
    return sum(each.nbytes for each in {id(each): each for each in weights}.values())
