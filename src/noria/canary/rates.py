"""Rates of bad responses in both arms: the evidence that the canary's is higher, and by how much it may be."""

from collections.abc import Sequence
from typing import NamedTuple

from noria.canary.e_processes import rate_interval, two_sample_log_factor

INCREASES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.9)  # that the e-process of a rate averages over
_PRIOR_BAD, _PRIOR_REQUESTS = 0.5, 50.0  # the guess of a rate of the control before the first window: 1 %
_MAX_RATE = 0.99  # highest of the alternatives, so that a success is possible under each


class Rate(NamedTuple):
    """Bad ones among responses: rejections among all, errors among those that were not rejected."""

    bad: int
    n: int

    @property
    def share(self) -> float:
        """0 without responses."""
        return self.bad / self.n if self.n else 0.0


def step_rate(logs_so_far: Sequence[float], before: Rate, control: Rate, canary: Rate) -> tuple[float, ...]:
    """Return the logs after a window, against "equal rates", for each increase over the control's rate `before`."""
    rate = (before.bad + _PRIOR_BAD) / (before.n + _PRIOR_REQUESTS)
    in_canary, in_control = ((arm.bad, arm.n - arm.bad) for arm in (canary, control))
    logs = []
    for log, increase in zip(logs_so_far, INCREASES, strict=True):
        higher = max(rate, min(rate + increase, _MAX_RATE))
        logs.append(log + two_sample_log_factor(in_canary, in_control, (higher, 1 - higher), (rate, 1 - rate)))
    return tuple(logs)


def increase_interval(control: Rate, canary: Rate, alpha: float) -> tuple[float, float]:
    """Return an interval of the canary's rate less the control's, at level 1 − alpha, valid at every look."""
    low, high = rate_interval(*control, alpha / 2)
    canary_low, canary_high = rate_interval(*canary, alpha / 2)
    return canary_low - high, canary_high - low
