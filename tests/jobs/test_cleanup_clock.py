"""The clock by which jobs grow old, over jumps of the machine's."""

from noria.jobs.cleanup_clock import CleanupClock

DAY_S = 86_400.0


class Machine:
    def __init__(self):
        self.wall, self.since_boot = 1e9, 0.0
        self.clock = CleanupClock(DAY_S, lambda: self.wall, lambda: self.since_boot)

    def age(self, ended_at, after_s):
        """Let time pass; return how old something is that ended at this time."""
        self.wall += after_s
        self.since_boot += after_s
        return self.clock() - ended_at


def test_a_jump_ahead_makes_nothing_older():
    machine = Machine()
    ended_at = machine.wall
    machine.wall += 365 * DAY_S
    assert machine.age(ended_at, 30) == 30
    assert machine.age(ended_at, DAY_S - 60) == DAY_S - 30
    assert machine.age(ended_at, 120) > DAY_S  # deleted when it is that old, by whatever clock


def test_a_clock_that_comes_back_after_a_jump_is_followed():
    machine = Machine()
    ended_at = machine.wall
    machine.wall += 2 * DAY_S
    assert machine.age(ended_at, 30) == 30
    machine.wall -= 2 * DAY_S
    assert machine.age(ended_at, 2 * DAY_S) == 2 * DAY_S + 30


def test_what_ends_after_a_clock_was_set_right_is_deleted_after_its_time():
    machine = Machine()
    machine.wall += 365 * DAY_S
    ended_at = machine.wall
    assert machine.age(ended_at, 30) < 0
    assert machine.age(ended_at, 1.5 * DAY_S) == 1.5 * DAY_S + 30


def test_a_clock_that_goes_back_or_is_corrected_by_seconds_is_followed():
    machine = Machine()
    ended_at = machine.wall
    machine.wall += 59
    assert machine.age(ended_at, 1) == 60
    machine.wall -= 1000
    assert machine.age(ended_at, 0) == -940
