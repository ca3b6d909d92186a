"""Which metrics an expression asks for; and every expression that we ship, parsed as Prometheus would and held against the declarations."""

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
EVERYWHERE = {"instance", "job"}  # Prometheus adds them


def shipped():
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for place, query in enumerate(panel.queries):
                    yield pytest.param(query.expr, id=f"{dashboard.uid} {panel.title} {place}")
    for question, expr in QUERIES.items():
        yield pytest.param(expr, id=question)
    for name in ("recording.yml", "alerts.yml"):
        for rule in (rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]):
            yield pytest.param(rule["expr"], id=rule.get("record") or rule.get("alert"))


def selectors(expr):
    """(metric, [(label, value)]) of each; raises ValueError for what is no PromQL, or wrongly typed."""
    found = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, [(each.name, each.value) for each in node.matchers.matchers]))

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def faults(expr):
    """Labels and codes that what it asks for does not have."""
    declared = {series: each for each in DECLARATIONS.values() for series in each.series}
    codes = {"ok"} | {kind.code for kind in kinds(NoriaError) if "code" in vars(kind)}
    for name, matchers in selectors(expr):
        if name not in declared:  # recorded, or Prometheus' own: tests/deploy looks after them
            continue
        labels = {*declared[name].labels, *EVERYWHERE, *(["le"] if name.endswith("_bucket") else [])}
        for label, value in matchers:
            if label not in labels:
                yield f"{name} has no label {label}"
            elif label in ("outcome", "reason") and name != "noria_webhooks_total":
                yield from (f"{code} is no outcome" for code in value.split("|") if code not in codes)


def kinds(kind):
    for below in kind.__subclasses__():
        yield below
        yield from kinds(below)


@pytest.mark.parametrize("expr", list(shipped()))
def test_what_is_shipped_is_promql_and_asks_for_labels_that_there_are(expr):
    assert list(faults(expr)) == []
    assert set(metrics_in(expr)) == {name for name, _ in selectors(expr)}


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("sum(up", "unclosed"),
        ("rate(noria_turns_total)", "expected type matrix"),
        ("histogram_quantile(noria_turns_total)", "expected 2 argument"),
        ("p95(noria_turns_total)", "unknown function"),
    ],
)
def test_what_is_no_promql_is_found(expr, fault):
    with pytest.raises(ValueError, match=fault):
        selectors(expr)


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ('rate(noria_turns_total{model="x"}[5m])', "noria_turns_total has no label model"),
        ('noria_requests_total{outcome=~"ok|engine_dead"}', "engine_dead is no outcome"),
        ('noria_request_seconds_sum{le="1"}', "noria_request_seconds_sum has no label le"),
    ],
)
def test_what_no_series_has_is_found(expr, fault):
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
def test_only_metrics_are_found(expr, names):
    assert metrics_in(expr) == names
