"""The number of front ends, in virtual time."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from noria.errors import ConfigError
from noria.supervisor.frontend_scaler import (
    SETTLE_S,
    START_ABOVE_CORES,
    STOP_AFTER_S,
    STOP_BELOW_CORES,
    WINDOW_S,
    FrontendScaler,
    StartFrontend,
    StopFrontend,
    process_bounds,
)

START_S = 3  # a process needs to accept connections


def simulate(loads, bounds, num_frontends):
    """Yield the number of front ends after each second; `loads` are the cores that clients demand in each."""
    scaler, new_pid = FrontendScaler(*bounds), itertools.count()
    cpu_s = {next(new_pid): 0.0 for _ in range(num_frontends)}
    starting_until = 0
    for now, load in enumerate(loads):
        cpu_s = {pid: used + min(load / len(cpu_s), 1.0) for pid, used in cpu_s.items()}
        if now < starting_until:
            scaler.changing()
        elif now == starting_until > 0:
            cpu_s[next(new_pid)] = 1.0
        match scaler.decide(cpu_s, now) if now >= starting_until else None:
            case StartFrontend():
                starting_until = now + START_S
            case StopFrontend():
                cpu_s.popitem()
        yield len(cpu_s)


bounds_and_number = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)).map(
    lambda drawn: ((drawn[0], drawn[0] + drawn[1]), min(drawn[0] + drawn[2], drawn[0] + drawn[1]))
)
phases = st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(1, 120)), max_size=12)


@given(bounds_and_number, phases)
def test_the_number_stays_within_its_bounds_and_changes_by_one_at_a_time(case, drawn):
    (fewest, most), number = case
    loads = [load for load, seconds in drawn for _ in range(seconds)]
    numbers = [number, *simulate(loads, (fewest, most), number)]
    assert set(numbers) <= set(range(fewest, most + 1))
    changes = [now for now, (before, after) in enumerate(itertools.pairwise(numbers)) if before != after]
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(numbers))
    assert all(second - first >= SETTLE_S + WINDOW_S for first, second in itertools.pairwise(changes))


@given(bounds_and_number, st.floats(0.0, 9.0))
@example(((1, 4), 1), START_ABOVE_CORES)
@example(((1, 4), 4), STOP_BELOW_CORES)
def test_under_a_constant_load_the_number_moves_in_one_direction_and_stays_where_it_fits(case, load):
    (fewest, most), number = case
    seconds = int(8 * (STOP_AFTER_S + SETTLE_S + WINDOW_S + START_S))
    numbers = [number, *simulate([load] * seconds, (fewest, most), number)]
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
    last, tolerance = numbers[-1], 1e-6
    assert last == most or load < START_ABOVE_CORES * last + tolerance
    assert last == fewest or load > STOP_BELOW_CORES * (last - 1) - tolerance


def test_full_load_starts_one_after_some_seconds_and_no_load_stops_it_after_a_minute():
    busy_s, idle_s = 40, 120
    numbers = list(simulate([1.0] * busy_s + [0.0] * idle_s, (1, 2), 1))
    assert numbers.index(2) == SETTLE_S + WINDOW_S + START_S
    assert busy_s + STOP_AFTER_S <= numbers.index(1, busy_s) <= busy_s + STOP_AFTER_S + WINDOW_S


def test_short_bursts_start_nothing_and_keep_what_there_is():
    bursts = ([1.0] * 3 + [0.0] * 27) * 10
    assert set(simulate(bursts, (1, 4), 1)) == {1}
    assert set(simulate(bursts, (1, 4), 2)) == {2}


def test_a_restarted_front_end_is_no_reason_for_a_decision():
    scaler, cpu_s = FrontendScaler(1, 4), {1: 1000.0}
    for now in range(1000):
        cpu_s = {pid: used + 0.9 for pid, used in cpu_s.items()} if now % 12 else {now: 0.0}
        assert scaler.decide(cpu_s, now) is None


@pytest.mark.parametrize(
    ("setting", "num_cores", "bounds"),
    [(3, 2, (3, 3)), ("1-4", 2, (1, 4)), ("2-2", 64, (2, 2)), ("auto", 1, (1, 1)), ("auto", 2, (1, 1)),
     ("auto", 9, (1, 4)), ("auto", 256, (1, 64))],
)  # fmt: skip
def test_the_bounds_are_those_of_the_setting_and_of_the_cores(setting, num_cores, bounds):
    assert process_bounds(setting, num_cores) == bounds


@pytest.mark.parametrize("setting", ["0", "65", "0-2", "3-2", "1-65"])
def test_bounds_that_are_not_allowed_are_rejected(setting):
    with pytest.raises(ConfigError, match=rf"frontend.processes is '{setting}'; allowed are"):
        process_bounds(setting, 8)
