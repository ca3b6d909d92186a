"""The options of the deadlines bench."""

import pytest

from noria_bench.benches.deadline_options import DEADLINE_TARGETS, read_deadline_targets, read_loads, read_seconds


def test_loads_are_sorted_without_duplicates():
    assert read_loads("150,50,90,50") == (50, 90, 150)


@pytest.mark.parametrize("text", ["", "x", "50,", "0", "-5", "5000", "1.5"])
def test_an_invalid_load_is_rejected(text):
    with pytest.raises(ValueError, match="loads are whole per cents"):
        read_loads(text)


def test_targets_come_in_the_order_of_the_tables():
    assert read_deadline_targets("reference,fcfs") == ("fcfs", "reference")
    assert read_deadline_targets(",".join(reversed(DEADLINE_TARGETS))) == DEADLINE_TARGETS


def test_the_error_for_an_unknown_target_lists_all():
    with pytest.raises(ValueError, match="'lifo'; policies are fair, least-slack, shortest-first, fcfs, reference"):
        read_deadline_targets("reference,lifo")


@pytest.mark.parametrize("text", ["0", "nan", "inf", "soon", "1e9"])
def test_an_invalid_length_is_rejected(text):
    with pytest.raises(ValueError, match="1 to 3600 seconds"):
        read_seconds(text)


def test_a_length_may_be_fractional():
    assert read_seconds("2.5") == 2.5
