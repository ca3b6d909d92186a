"""Values that count as flat, and values that count as growth."""

import pytest

from noria_bench.soak.flatness import flatness

AT_S = [float(number) for number in range(200)]
MEGABYTE = 2**20


def test_growth_of_the_first_half_and_peaks_are_no_growth():
    values = [min(at, 100.0) * MEGABYTE for at in AT_S]
    for at in (120, 150, 151, 152, 190):
        values[at] *= 20
    found = flatness("engine PSS", AT_S, values)
    assert found.is_flat and found.growth_per_h == 0 and found.median == 100 * MEGABYTE


@pytest.mark.parametrize("minutes", [15, 60])
@pytest.mark.parametrize(
    ("quantity", "per_h", "is_flat"),
    [
        ("frontend threads", 3.0, True),
        ("frontend threads", 5.0, False),
        ("frontend PSS", 60 * MEGABYTE, True),
        ("frontend PSS", 68 * MEGABYTE, False),
        ("engine files", -10.0, True),
    ],
)
def test_growth_in_an_hour_beyond_the_bound_is_not_flat_in_a_run_of_any_length(quantity, per_h, is_flat, minutes):
    at_s = [minutes * 0.3 * at for at in AT_S]
    found = flatness(quantity, at_s, [10.0 + per_h * at / 3600 for at in at_s])
    assert found.is_flat is is_flat
    assert found.growth_per_h == pytest.approx(per_h, rel=0.01)


def test_moments_without_the_process_are_left_out():
    values = [None if int(at) % 3 else 5.0 for at in AT_S]
    assert flatness("engine threads", AT_S, values).is_flat
    assert flatness("engine threads", AT_S, [1.0, *[None] * 199]) is None
