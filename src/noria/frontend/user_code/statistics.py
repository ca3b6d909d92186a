"""Statistics of user code: one histogram, in which each statistic has buckets of its own."""

import math

from prometheus_client import Histogram

from noria.errors import ConfigError
from noria.frontend.user_code.loading import LoadedCode
from noria.observe.metrics import declarations

_series: dict[tuple[str, str], tuple[tuple[float, ...], Histogram]] = {}


def declare_statistics(endpoint: str, code: LoadedCode) -> None:
    """Export the statistics of a class, at 0 at first.

    Raises:
        ConfigError: one has other buckets than before, whose counts are exported until the server ends.

    """
    for name, buckets in code.statistics.items():
        known, _ = _series.get((endpoint, name), (buckets, None))
        if known != buckets:
            raise ConfigError(
                f"endpoint {endpoint!r}: statistics[{name!r}] has other buckets than since the start; give it another "
                "name, or restart the server."
            )
    for name, buckets in code.statistics.items():
        if (endpoint, name) not in _series:
            _series[endpoint, name] = buckets, _make_series(endpoint, name, buckets)


def record_statistic(endpoint: str, code: LoadedCode, name: str, value: float) -> None:
    """Observe a value. Raises ValueError if the class has no such statistic, or the value is not finite."""
    if name not in code.statistics:
        raise ValueError(f"the class has no statistic {name!r}; it has {', '.join(code.statistics) or 'none'}")
    if not math.isfinite(value):
        raise ValueError(f"statistic {name!r} got {value}")
    _series[endpoint, name][1].observe(float(value))


def _make_series(endpoint: str, name: str, buckets: tuple[float, ...]) -> Histogram:
    """Return the histogram of these labels. `labels` of prometheus_client would give it the buckets of the metric."""
    metric, labels = declarations.USER_STATISTIC, (endpoint, name)
    series = Histogram(
        metric._name,
        metric._documentation,
        metric._labelnames,
        registry=None,
        _labelvalues=labels,
        buckets=buckets,
    )
    metric._metrics[labels] = series  # type: ignore[assignment]
    return series
