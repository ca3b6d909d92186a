"""The metrics in an expression are found.

Every shipped expression is valid PromQL and uses declared metrics and labels.
"""

import pathlib

import promql_parser
import pytest
import yaml

from noria.dashboards.build import DASHBOARDS
from noria.dashboards.promql import metrics_in
from noria.errors import NoriaError
from noria.observe.metrics.declarations import DECLARATIONS
from noria.observe.metrics.docs_page import QUERIES

RULES = pathlib.Path(__file__).parents[2] / "deploy" / "prometheus"
TARGET_LABELS = {"instance", "job"}  # added by Prometheus


def shipped():
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for position, query in enumerate(panel.queries):
                    yield pytest.param(query.expr, id=f"{dashboard.uid} {panel.title} {position}")
    for question, expr in QUERIES.items():
        yield pytest.param(expr, id=question)
    for name in ("recording.yml", "alerts.yml"):
        for rule in (rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]):
            yield pytest.param(rule["expr"], id=rule.get("record") or rule.get("alert"))


def selectors(expr):
    """Return (metric, [(label, value)]) of each selector. Raises ValueError for invalid PromQL."""
    found = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, [(each.name, each.value) for each in node.matchers.matchers]))

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def faults(expr):
    """Yield labels and codes in `expr` that do not exist."""
    declared = {series: each for each in DECLARATIONS.values() for series in each.series}
    codes = {"ok"} | {kind.code for kind in kinds(NoriaError) if "code" in vars(kind)}
    for name, matchers in selectors(expr):
        if name not in declared:  # recorded, or Prometheus' own: tested in tests/deploy
            continue
        labels = {*declared[name].labels, *TARGET_LABELS, *(["le"] if name.endswith("_bucket") else [])}
        for label, value in matchers:
            if label not in labels:
                yield f"{name} has no label {label}"
            elif label in ("outcome", "reason") and name != "noria_webhook_attempts_total":
                yield from (f"{code} is no outcome" for code in value.split("|") if code not in codes)


def kinds(kind):
    for below in kind.__subclasses__():
        yield below
        yield from kinds(below)


@pytest.mark.parametrize("expr", list(shipped()))
def test_shipped_expressions_are_valid_and_use_labels_that_exist(expr):
    assert list(faults(expr)) == []
    assert set(metrics_in(expr)) == {name for name, _ in selectors(expr)}


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("sum(up", "unclosed"),
        ("rate(noria_iterations_total)", "expected type matrix"),
        ("histogram_quantile(noria_iterations_total)", "expected 2 argument"),
        ("p95(noria_iterations_total)", "unknown function"),
    ],
)
def test_invalid_promql_is_found(expr, fault):
    with pytest.raises(ValueError, match=fault):
        selectors(expr)


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ('rate(noria_iterations_total{model="x"}[5m])', "noria_iterations_total has no label model"),
        ('noria_requests_total{outcome=~"ok|engine_dead"}', "engine_dead is no outcome"),
        ('noria_request_seconds_sum{le="1"}', "noria_request_seconds_sum has no label le"),
    ],
)
def test_labels_and_codes_that_do_not_exist_are_found(expr, fault):
    assert list(faults(expr)) == [fault]


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
def test_exactly_the_metrics_are_found(expr, names):
    assert metrics_in(expr) == names
