"""The loaded LoRA adapters of one model: bounded by bytes, the least recently used are evicted.

A prepared request holds its adapters, and what any request holds is never evicted: it stays in memory, counts, and is
found again, whether or not it is among the recently used. So nothing has to be returned, whatever ends a request.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from noria.errors import InvalidField, QueueFull
from noria.models.diffusion.lora_file import LoraWeights
from noria.protocol.diffusion import Lora

_RETRY_AFTER_S = 5.0  # an image of the usual 20 to 50 steps takes a few seconds


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter, as one request uses it."""

    digest: str
    weights: LoraWeights
    weight: float


Adapters = tuple[Adapter, ...]
"""Those of one request, whose changes are added."""


class LoraCache:
    """At most `max_bytes` of adapters. Any thread may use it; none waits while another reads a file."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device, self._max_bytes = device, max_bytes
        self._alive: weakref.WeakValueDictionary[str, LoraWeights] = weakref.WeakValueDictionary()  # by digest
        self._recent: OrderedDict[str, LoraWeights] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters that are in memory."""
        return sum(weights.nbytes for weights in list(self._alive.values()))

    def has(self, loras: Sequence[Lora]) -> bool:
        """Whether all of these are loaded."""
        return all(lora.digest in self._alive for lora in loras)

    def loaded(self, digest: str, weight: float) -> Adapter:
        """Return an adapter that a request holds."""
        return Adapter(digest, self._alive[digest], weight)

    def get(self, loras: Sequence[Lora], load: Callable[[Lora], LoraWeights]) -> Adapters:
        """Return the adapters of a request; `load` reads those that are not in memory, onto the CPU.

        Raises:
            InvalidField: an adapter is too large for the cache, or `load` raises it.
            QueueFull: the adapters of other requests fill the cache.

        """
        return tuple(
            Adapter(lora.digest or "", self._find(lora) or self._add(lora, load(lora)), lora.weight) for lora in loras
        )

    def _find(self, lora: Lora) -> LoraWeights | None:
        with self._lock:
            weights = self._alive.get(lora.digest or "")
            return None if weights is None else self._touch(lora, weights)

    def _add(self, lora: Lora, weights: LoraWeights) -> LoraWeights:
        with self._lock:
            self._make_room(lora, weights.nbytes)
            return self._touch(lora, weights.to(self._device))

    def _touch(self, lora: Lora, weights: LoraWeights) -> LoraWeights:
        assert lora.digest, "requests of engines have digests"
        self._alive[lora.digest] = self._recent[lora.digest] = weights
        self._recent.move_to_end(lora.digest)
        return weights

    def _make_room(self, lora: Lora, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidField(
                f"loras: {lora.name!r} takes {num_bytes} bytes; engine.lora_cache_bytes allows {self._max_bytes}.",
                field="loras",
            )
        while self._recent and self.num_bytes + num_bytes > self._max_bytes:
            self._recent.popitem(last=False)  # freed, unless a request holds it
        if self.num_bytes + num_bytes > self._max_bytes:
            raise QueueFull(
                f"the LoRA adapters of accepted requests take {self.num_bytes} bytes; {lora.name!r} takes {num_bytes} "
                f"more, and engine.lora_cache_bytes allows {self._max_bytes}",
                retry_after_s=_RETRY_AFTER_S,
            )
