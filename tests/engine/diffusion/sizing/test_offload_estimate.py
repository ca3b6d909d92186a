"""Predictions of what offloading saves and costs."""

import msgspec
import pytest

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto
from noria.engine.diffusion.sizing.memory_estimate import estimate_memory
from noria.engine.diffusion.sizing.offload_estimate import (
    REFERENCE_DEVICES,
    find_offloads,
    free_for_blocks,
    rows_that_hide,
    step_bytes,
)
from noria.models.catalog import open_model

GPU = Machine(16, has_cuda=True)


@pytest.fixture(scope="module")
def spec(tiny_folder):
    return open_model(str(tiny_folder))


def test_rows_hide_the_copy_of_a_published_size_as_computed_by_hand():
    """FLUX.1 in bfloat16: 11.9 B weights, and 75 TFLOP for a row of 1024² px."""
    assert [round(rows_that_hide(23_800_000_000, 75 * 10**12, each), 1) for each in REFERENCE_DEVICES] == [1.4, 2.8]


def test_each_kind_of_offloading_takes_less_than_the_one_before(spec):
    config = resolve_auto(EngineConfig(), spec, "cuda:0", GPU)
    estimate = estimate_memory(spec, config)
    assert estimate.row_flops > 10**6
    changes = find_offloads(spec, config, estimate, "cuda:0", None)
    needed = [estimate.needed(4), *(change.estimate.needed(4) for change in changes)]
    assert [change.names for change in changes] == [("--offload encoders",), ("--offload blocks",)]
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == 3
    blocks = changes[1].estimate
    assert step_bytes(spec, blocks) == blocks.streamed["unet"] > 0
    assert step_bytes(spec, changes[0].estimate) == 0
    with_much = find_offloads(spec, config, estimate, "cuda:0", 2**36)[1].estimate
    assert "unet" not in with_much.streamed  # all of it stays
    assert find_offloads(spec, config, estimate, "cpu", None) == ()
    quantized = msgspec.structs.replace(config, quantize="nf4")
    assert [each.names for each in find_offloads(spec, quantized, estimate, "cuda:0", None)] == [
        ("--offload encoders",)
    ]


def test_blocks_stay_in_what_four_images_leave_free(spec):
    config = resolve_auto(EngineConfig(offload="blocks"), spec, "cuda:0", GPU)
    needed = estimate_memory(spec, msgspec.structs.replace(config, offload_resident_bytes=0)).needed(4)
    assert free_for_blocks(spec, config, needed) == 0
    assert free_for_blocks(spec, config, int((needed + 3 * 2**28) / 0.9) + 1) == 3 * 2**28
