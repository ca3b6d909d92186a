"""E-processes: evidence against a null hypothesis that may be looked at after every window.

An e-process is never negative, and its expectation is at most 1 whenever one stops if the null hypothesis holds. So the
probability that it ever reaches 1/α is at most α (Ville, 1939; Ramdas et al., arXiv 2210.01948), while a p-value that
is looked at again and again falls below α almost surely. Each function returns the factor of one window or a sum of
them; all values are natural logarithms. The estimates that go into a window's factor may use earlier windows only.
"""

import math
from collections.abc import Callable, Sequence


def two_sample_log_factor(
    canary: Sequence[int], control: Sequence[int], p_canary: Sequence[float], p_control: Sequence[float]
) -> float:
    """Return the log of one window's factor against "both arms have the same distribution over the cells".

    Π_k (p_canary,k / p₀,k)^canary,k (p_control,k / p₀,k)^control,k, with p₀ the mean of p_canary and p_control weighted
    by the arms' totals, for the counts of each arm and any positive probabilities fixed before the window (Turner, Ly
    and Grünwald, arXiv 2106.02693). The distribution that both arms share may be another in each window. 0 if an arm
    has no counts.
    """
    n_canary, n_control = sum(canary), sum(control)
    if not n_canary or not n_control:
        return 0.0
    log_factor, share = 0.0, n_canary / (n_canary + n_control)
    for x_canary, x_control, p, q in zip(canary, control, p_canary, p_control, strict=True):
        p0 = share * p + (1 - share) * q
        log_factor += x_canary * math.log(p / p0) + x_control * math.log(q / p0)
    return log_factor


def bet(logs: Sequence[float], stakes: Sequence[float], payoff: float) -> tuple[float, ...]:
    """Return the logs of wealth after one more bet, for each stake: + log(1 + stake · payoff).

    `payoff` is in [−1, 1], and its expectation given the past is at most 0 under the null hypothesis; stakes are in
    (−1, 1). Betting: Shafer, 2021; Waudby-Smith and Ramdas, arXiv 2010.09686; of two samples: Shekhar and Ramdas,
    arXiv 2112.09162; of canaries: Lindon, Sanden and Shirikian, arXiv 2205.14762.
    """
    return tuple(log + math.log1p(stake * payoff) for log, stake in zip(logs, stakes, strict=True))


def log_mean_exp(logs: Sequence[float]) -> float:
    """Return log(mean(exp(logs))). The mean of e-processes is one, however they depend (Vovk and Wang, 1912.06116)."""
    largest = max(logs)
    return largest + math.log(sum(math.exp(log - largest) for log in logs) / len(logs))


def rate_interval(successes: int, n: int, alpha: float) -> tuple[float, float]:
    """Return a confidence sequence's interval of a probability: all true ones of a run hold it at once with 1 − α.

    {p: B(½ + s, ½ + n − s) / B(½, ½) < (1/α) p^s (1 − p)^(n − s)}: the mixture of likelihoods over a Beta(½, ½) prior,
    over the likelihood of p, is a martingale if p is true (Robbins, 1970; Howard et al., arXiv 1810.08240).
    """
    if not n:
        return 0.0, 1.0
    failures = n - successes
    log_mixture = math.lgamma(successes + 0.5) + math.lgamma(failures + 0.5) - math.lgamma(n + 1) - math.log(math.pi)
    log_limit = log_mixture + math.log(alpha)  # limit of the log likelihood: B(½, ½) is π

    def is_outside(p: float) -> bool:
        return successes * math.log(p) + failures * math.log1p(-p) <= log_limit

    mean = successes / n
    low = _border(is_outside, 0.0, mean) if successes else 0.0
    high = _border(is_outside, 1.0, mean) if failures else 1.0
    return low, high


def _border(is_outside: Callable[[float], bool], outside: float, inside: float) -> float:
    """The border by bisection, to 1e-9, on the side of `outside`."""
    while abs(outside - inside) > 1e-9:
        middle = (outside + inside) / 2
        if is_outside(middle):
            outside = middle
        else:
            inside = middle
    return outside
