"""Windows of a canary: complete ones only, in order, of all front ends together."""

from noria.canary.arm import Arm
from noria.canary.windows import MAX_CONTROL_RESPONSES, MAX_REPEATS, MIN_CANARY_RESPONSES, CanaryWindows, WindowReport


def report(window: int, canary: int, control: int = 10) -> WindowReport:
    return WindowReport(1, window, Arm(control), Arm(canary))


def test_a_window_waits_until_its_requests_have_ended() -> None:
    windows = CanaryWindows()
    windows.add(report(5, canary=7))
    assert list(windows.take(first_open=5)) == []
    assert list(windows.take(first_open=6)) == [(Arm(10), Arm(7))]
    assert list(windows.take(first_open=7)) == []


def test_the_counts_of_front_ends_are_added() -> None:
    windows = CanaryWindows()
    windows.add(report(5, canary=3))
    windows.add(report(5, canary=4, control=1))
    assert list(windows.take(6)) == [(Arm(11), Arm(7))]


def test_windows_with_few_responses_of_the_canary_are_judged_together() -> None:
    windows = CanaryWindows()
    for window in range(4):
        windows.add(report(window, canary=MIN_CANARY_RESPONSES - 3))
    assert list(windows.take(2)) == []
    assert windows.num_waiting == (20, 4)
    assert list(windows.take(4)) == [(Arm(30), Arm(6))]
    assert windows.num_waiting == (10, 2)


def test_windows_of_few_users_are_judged_with_many_repeats() -> None:
    windows = CanaryWindows()
    arms = Arm(3, repeats=MAX_REPEATS), Arm(1, repeats=1)
    windows.add(WindowReport(1, 1, *arms))
    windows.add(WindowReport(1, 2, Arm(), Arm(repeats=1)))
    assert list(windows.take(3)) == [arms]


def test_windows_without_the_canary_are_dropped_before_they_fill_the_memory() -> None:
    windows = CanaryWindows()
    windows.add(report(1, canary=1, control=MAX_CONTROL_RESPONSES + 1))
    windows.add(report(2, canary=MIN_CANARY_RESPONSES))
    assert list(windows.take(3)) == [(Arm(10), Arm(MIN_CANARY_RESPONSES))]


def test_windows_are_taken_in_order_whenever_they_were_reported() -> None:
    windows = CanaryWindows()
    for window, canary in ((3, 30), (1, 10), (2, 20)):
        windows.add(report(window, canary))
    assert [canary.n for _, canary in windows.take(4)] == [10, 20, 30]
