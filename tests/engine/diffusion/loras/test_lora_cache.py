"""The cache of adapters: bounded whatever is asked for, and what a request holds is never evicted."""

import gc
import threading

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from noria.engine.diffusion.loras.lora_cache import LoraCache
from noria.errors import InvalidField, QueueFull
from noria.models.diffusion.loras.lora_layer import LoraLayer, LoraWeights
from noria.protocol.diffusion import Lora

CPU = torch.device("cpu")
NUM_HELD = 4  # adapters, of 24 bytes each, that requests can hold: what is stacked for them takes as much again
MAX_BYTES = NUM_HELD * 48


def weights_of(number, rank=1):
    layer = LoraLayer(torch.full((rank, 2), float(number)), torch.ones(4, rank))
    return LoraWeights({"unet": {"a": layer}})


def lora(number, weight=1.0):
    return Lora(f"a{number}", weight, f"{number:012}")


def get(cache, number, loads=None):
    def load(wanted):
        if loads is not None:
            loads.append(wanted.name)
        return weights_of(number)

    return cache.get([lora(number)], load)


def test_a_thousand_adapters_are_cycled_through_a_bounded_cache():
    cache, loads = LoraCache({"unet": CPU}, MAX_BYTES), []
    for number in list(range(1000)) * 2:
        (adapter,) = get(cache, number, loads)
        assert (adapter.digest, float(adapter.weights.layers["unet"]["a"].down[0, 0])) == (f"{number:012}", number)
        del adapter
        assert cache.num_bytes <= MAX_BYTES
    assert len(loads) == 2000
    assert cache.num_bytes == 7 * 24
    for number in range(993, 1000):
        get(cache, number, loads)
    assert len(loads) == 2000


def test_the_least_recently_used_is_evicted():
    cache, loads = LoraCache({"unet": CPU}, MAX_BYTES), []
    for number in (0, 1, 2, 3, 4, 5, 6, 0, 7, 0, 1):
        get(cache, number, loads)
    assert loads == ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a1"]


def test_an_adapter_larger_than_the_cache_is_rejected_and_changes_nothing():
    cache = LoraCache({"unet": CPU}, MAX_BYTES)
    get(cache, 1)
    with pytest.raises(InvalidField, match=r"'a2' takes 216 bytes; engine\.lora_cache_bytes allows 192"):
        cache.get([lora(2)], lambda _: weights_of(2, rank=9))
    assert cache.has([lora(1)]) and not cache.has([lora(2)])


def test_what_is_stacked_counts_once_for_equal_sets_and_at_the_padded_rank():
    cache = LoraCache({"unet": CPU}, 1000)
    held = [cache.get([lora(1, weight)], lambda _: weights_of(1, rank=3)) for weight in (1.0, 1.0, 0.5)]
    assert held[0] is held[1]
    assert cache.num_bytes == 3 * 24 + 2 * 4 * 24
    held.append(cache.get([lora(1), lora(2)], lambda wanted: weights_of(int(wanted.name[1:]), rank=2)))
    assert cache.num_bytes == 3 * 24 + 2 * 24 + 2 * 4 * 24 + 8 * 24
    held.clear()
    gc.collect()
    assert cache.num_bytes == 5 * 24


def test_vectors_and_kronecker_products_count_as_they_are():
    layer = LoraLayer(torch.ones(3, 2), torch.ones(4, 3), torch.ones(2, 1), torch.ones(2, 2), bias=torch.ones(4))
    cache = LoraCache({"unet": CPU}, 1000)
    held = cache.get([lora(1)], lambda _: LoraWeights({"unet": {"a": layer}}))
    others = 4 * (2 + 4 + 4)
    assert cache.num_bytes == (3 * 24 + others) + (4 * 24 + others), held


def test_a_request_that_cannot_fit_beside_what_is_held_evicts_nothing():
    cache = LoraCache({"unet": CPU}, MAX_BYTES)
    held = [get(cache, number) for number in range(3)]
    get(cache, 3)
    with pytest.raises(QueueFull, match="of accepted requests take 144 bytes; 'a4' takes 96 more"):
        cache.get([lora(4)], lambda _: weights_of(4, rank=4))
    assert cache.has([lora(3)]), held


def test_adapters_that_the_device_has_no_memory_for_are_rejected(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LoraWeights, "to", no_memory)
    with pytest.raises(QueueFull, match=r"more than the device's memory has now\. Set engine\.lora_cache_bytes lower"):
        get(LoraCache({"unet": CPU}, MAX_BYTES), 1)


def test_nobody_waits_for_a_file_that_another_thread_reads():
    cache, reading, finish = LoraCache({"unet": CPU}, MAX_BYTES), threading.Event(), threading.Event()
    get(cache, 1)

    def load(_):
        reading.set()
        assert finish.wait(60)
        return weights_of(2)

    thread = threading.Thread(target=lambda: cache.get([lora(2)], load))
    thread.start()
    assert reading.wait(60)
    assert get(cache, 1) and not cache.get([], load)
    finish.set()
    thread.join()
    assert cache.has([lora(2)])


class Requests(RuleBasedStateMachine):
    """Requests come with adapters, and end."""

    def __init__(self):
        super().__init__()
        self.cache, self.held, self.num_begun = LoraCache({"unet": CPU}, MAX_BYTES), {}, 0

    @rule(number=st.integers(0, 9))
    def begin(self, number):
        needed = {each for each, _ in self.held.values()} | {number}
        try:
            adapters = get(self.cache, number)
        except QueueFull:
            assert len(needed) > NUM_HELD
            return
        assert len(needed) <= NUM_HELD
        self.num_begun += 1
        self.held[self.num_begun] = number, adapters

    @rule(chosen=st.integers(0, 9))
    def end(self, chosen):
        if chosen < len(self.held):
            del self.held[list(self.held)[chosen]]

    @invariant()
    def what_is_held_is_there_and_the_cache_is_bounded(self):
        assert self.cache.num_bytes <= MAX_BYTES
        for number, adapters in self.held.values():
            assert self.cache.loaded(f"{number:012}", 1.0) == adapters.each[0]


TestRequests = Requests.TestCase
