"""Which metrics an expression asks for."""

import pytest

from noria.dashboards.promql import metrics_in


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("up", ["up"]),
        ('sum by (le, model) (rate(noria_a_bucket{outcome=~"x|y",n="sum"}[5m]))', ["noria_a_bucket"]),
        ("histogram_quantile(0.95, sum(rate(a_bucket[1m])) by (le))", ["a_bucket"]),
        ("a / on (instance) group_left (job) b", ["a", "b"]),
        ("(sum(rate(a[5m])) or vector(0)) / 1e3 unless b offset 5m", ["a", "b"]),
        ("a > bool 3 and a", ["a"]),
        ("instance_model:a:rate5m", ["instance_model:a:rate5m"]),
        ('label_replace(a, "x", "$1", "y", "(b.*)")', ["a"]),
        ("max_over_time(rate(a[5m])[1h:1m])", ["a"]),
    ],
)
def test_only_metrics_are_found(expr, names):
    assert metrics_in(expr) == names
