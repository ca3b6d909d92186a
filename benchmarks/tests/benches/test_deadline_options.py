"""What the contract bench's options may be."""

import pytest

from noria_bench.benches.deadline_options import DEADLINE_TARGETS, read_deadline_targets, read_loads, read_seconds


def test_loads_are_sorted_and_named_once():
    assert read_loads("150,50,90,50") == (50, 90, 150)


@pytest.mark.parametrize("text", ["", "x", "50,", "0", "-5", "5000", "1.5"])
def test_what_is_no_load_is_refused(text):
    with pytest.raises(ValueError, match="loads are whole per cents"):
        read_loads(text)


def test_targets_come_in_the_order_of_the_tables():
    assert read_deadline_targets("seed,fcfs") == ("fcfs", "seed")
    assert read_deadline_targets(",".join(reversed(DEADLINE_TARGETS))) == DEADLINE_TARGETS


def test_an_unknown_target_is_answered_with_all_of_them():
    with pytest.raises(ValueError, match="'lifo'; policies are least-slack, shortest-first, fcfs, seed"):
        read_deadline_targets("seed,lifo")


@pytest.mark.parametrize("text", ["0", "nan", "inf", "soon", "1e9"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="1 to 3600 seconds"):
        read_seconds(text)


def test_a_length_may_be_broken():
    assert read_seconds("2.5") == 2.5
