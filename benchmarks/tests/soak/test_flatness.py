"""What counts as flat."""

import pytest

from noria_bench.soak.flatness import flatness

AT_S = [float(number) for number in range(200)]
MEGABYTE = 2**20


def test_growth_of_the_first_half_and_peaks_are_no_growth():
    values = [min(at, 100.0) * MEGABYTE for at in AT_S]
    for at in (120, 150, 151, 152, 190):
        values[at] *= 20
    found = flatness("engine PSS", AT_S, values)
    assert found.is_flat and found.growth == 0 and found.median == 100 * MEGABYTE


@pytest.mark.parametrize(
    ("quantity", "per_s", "is_flat"),
    [
        ("frontend threads", 0.005, True),
        ("frontend threads", 0.05, False),
        ("frontend PSS", 0.1 * MEGABYTE, True),
        ("frontend PSS", 0.3 * MEGABYTE, False),
        ("engine files", -1.0, True),
    ],
)
def test_growth_beyond_the_bound_is_not_flat(quantity, per_s, is_flat):
    found = flatness(quantity, AT_S, [10.0 + per_s * at for at in AT_S])
    assert found.is_flat is is_flat
    assert found.growth == pytest.approx(99 * per_s, rel=0.01, abs=0.01)


def test_moments_without_the_process_are_left_out():
    values = [None if int(at) % 3 else 5.0 for at in AT_S]
    assert flatness("engine threads", AT_S, values).is_flat
    assert flatness("engine threads", AT_S, [1.0, *[None] * 199]) is None
