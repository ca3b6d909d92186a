"""The sizes of the calls for which blocks are compiled."""

from types import SimpleNamespace

from msgspec.structs import replace

from noria.engine.diffusion.warmup.block_warmup import _sizes_of_rows
from noria.testing.fake_engine import FAKE_MODEL

SPEC = replace(FAKE_MODEL, default_width_px=64, default_height_px=48, min_side_px=32, multiple_px=8)
SIZES = [(32, 32), (32, 48), (64, 48), (56, 48)]


def sizes_of_rows(num_rows, call_size):
    return list(_sizes_of_rows(SimpleNamespace(call_size=call_size), SPEC, num_rows))


def test_calls_have_rows_of_one_size_or_of_two_that_share_calls():
    shared = {64 * 48: 3072, 56 * 48: 3072, 32 * 48: 2048}
    assert sizes_of_rows(1, shared.get) == [[size] for size in SIZES]
    assert sizes_of_rows(3, shared.get) == [*([size] * 3 for size in SIZES), [(64, 48), (56, 48), (56, 48)]]
    assert sizes_of_rows(2, lambda _: None) == [[size] * 2 for size in SIZES]
