"""The cache of adapters: bounded whatever is asked for, and what a request holds is never evicted."""

import threading

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from noria.engine.diffusion.lora_cache import LoraCache
from noria.errors import InvalidField, QueueFull
from noria.models.diffusion.lora_file import LoraLayer, LoraWeights
from noria.protocol.diffusion import Lora

CPU = torch.device("cpu")
ROOM = 4  # adapters of 24 bytes


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
    cache, loads = LoraCache(CPU, ROOM * 24), []
    for number in list(range(1000)) * 2:
        (adapter,) = get(cache, number, loads)
        assert (adapter.digest, float(adapter.weights.layers["unet"]["a"].down[0, 0])) == (f"{number:012}", number)
        del adapter
        assert cache.num_bytes <= ROOM * 24
    assert len(loads) == 2000
    assert cache.num_bytes == ROOM * 24
    for number in range(996, 1000):
        get(cache, number, loads)
    assert len(loads) == 2000


def test_the_least_recently_used_is_evicted():
    cache, loads = LoraCache(CPU, ROOM * 24), []
    for number in (0, 1, 2, 3, 0, 4, 0, 1):
        get(cache, number, loads)
    assert loads == ["a0", "a1", "a2", "a3", "a4", "a1"]


def test_an_adapter_larger_than_the_cache_is_rejected_and_changes_nothing():
    cache = LoraCache(CPU, ROOM * 24)
    get(cache, 1)
    with pytest.raises(InvalidField, match=r"'a2' takes 120 bytes; engine\.lora_cache_bytes allows 96"):
        cache.get([lora(2)], lambda _: weights_of(2, rank=5))
    assert cache.has([lora(1)]) and not cache.has([lora(2)])


def test_nobody_waits_for_a_file_that_another_thread_reads():
    cache, reading, finish = LoraCache(CPU, ROOM * 24), threading.Event(), threading.Event()
    get(cache, 1)

    def load(_):
        reading.set()
        assert finish.wait(60)
        return weights_of(2)

    thread = threading.Thread(target=lambda: cache.get([lora(2)], load))
    thread.start()
    assert reading.wait(60)
    assert get(cache, 1) and cache.get([], load) == ()
    finish.set()
    thread.join()
    assert cache.has([lora(2)])


class Requests(RuleBasedStateMachine):
    """Requests come with adapters, and end."""

    def __init__(self):
        super().__init__()
        self.cache, self.held, self.num_begun = LoraCache(CPU, ROOM * 24), {}, 0

    @rule(number=st.integers(0, 9))
    def begin(self, number):
        needed = {each for each, _ in self.held.values()} | {number}
        try:
            adapters = get(self.cache, number)
        except QueueFull:
            assert len(needed) > ROOM
            return
        assert len(needed) <= ROOM
        self.num_begun += 1
        self.held[self.num_begun] = number, adapters

    @rule(chosen=st.integers(0, 9))
    def end(self, chosen):
        if chosen < len(self.held):
            del self.held[list(self.held)[chosen]]

    @invariant()
    def what_is_held_is_there_and_the_cache_is_bounded(self):
        assert self.cache.num_bytes <= ROOM * 24
        for number, adapters in self.held.values():
            assert self.cache.loaded(f"{number:012}", 1.0) == adapters[0]


TestRequests = Requests.TestCase
