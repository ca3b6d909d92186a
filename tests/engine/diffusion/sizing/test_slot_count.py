"""`engine.slots` = auto: the slots that fit beside a warm model, and where the number came from."""

import pytest

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_runtime
from noria.engine.diffusion.sizing.slot_count import count_slots
from noria.models.catalog import open_model

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("free", "calls", "slot", "images", "slots", "source"),
    [
        (120 * GIB, GIB, MIB, 1, 32, "maximum"),
        (100 * MIB, 0, MIB, 1, 25, "memory"),  # a quarter of what is free
        (400 * MIB, 190 * MIB, MIB, 1, 20, "memory"),  # the calls need more than three quarters
        (400 * MIB, 300 * MIB, MIB, 1, 2, "minimum"),  # or all
        (0, 0, MIB, 1, 2, "minimum"),
        (0, 0, MIB, 24, 24, "minimum"),  # as many as the largest bucket has images
        (400 * MIB, 0, 20 * MIB, 1, 5, "memory"),
        (GIB, 0, 0, 64, 64, "maximum"),
        (GIB, 0, 0, 1024, 512, "maximum"),
    ],
)
def test_slots_take_a_quarter_of_the_free_memory_less_what_calls_need(free, calls, slot, images, slots, source):
    count = count_slots(free, calls, slot, images)
    assert (count.slots, count.source) == (slots, source)


def test_the_reason_has_the_bytes_that_decided():
    reason = count_slots(400 * MIB, 185 * MIB, 3 * MIB // 2).reason
    assert reason == "auto: by memory; 1.50 MiB each, 400 MiB free, 370 kept for calls"


def test_a_real_engine_has_the_slots_that_fit_its_memory(bundled_folder, tmp_path):
    """Its slot is 64 × 64 px: 4 × 8 × 8 values in 9 columns, a mask's three, and two embeddings."""
    spec, read = open_model(str(bundled_folder)), []

    def free_bytes(device):
        read.append(device)
        return 2 * MIB

    def load(**settings):
        config = EngineConfig(dtype="float32", threads=1, cache_dir=str(tmp_path), **settings)
        return load_runtime([spec], config, "cpu", free_bytes)

    runtime = load()
    slots = runtime.scheduler.num_slots
    assert read == ["cpu"]
    assert (4 < slots < 32, runtime.slots_source) == (True, "memory")
    assert runtime.resolved_settings["slots"].startswith(f"{slots} (auto: by memory; ")
    assert load(devices=("cpu", "cpu")).scheduler.num_slots == slots // 2
    assert runtime.scheduler.costs.max_rows == 2 * slots
    fixed = load(slots=3)
    assert (fixed.scheduler.num_slots, fixed.slots_source) == (3, "set")
    assert fixed.resolved_settings["slots"] == "3 (engine.slots)"
    assert len(list((tmp_path / "costs").iterdir())) == 1, "the number of slots changes no cost"
