"""Prometheus' rules and configuration use known metrics and pass promtool (Debian: prometheus)."""

import pathlib
import re
import subprocess

import pytest
import yaml

from noria.dashboards.build import DASHBOARDS
from noria.dashboards.promql import metrics_in
from noria.observe.metrics.declarations import DECLARATIONS

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"


def rules():
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((RULES / name).read_text())["groups"]:
            yield from group["rules"]


def test_rules_use_only_declared_or_recorded_metrics():
    known = {name for declared in DECLARATIONS.values() for name in declared.series}
    known |= {rule["record"] for rule in rules() if "record" in rule} | {"up"}
    for rule in rules():
        assert set(metrics_in(rule["expr"])) <= known, rule


def test_every_metric_is_on_a_dashboard_or_in_a_rule():
    expressions = {query.expr for dashboard in DASHBOARDS for query in dashboard.queries} | {
        rule["expr"] for rule in rules()
    }
    names = {name for expr in expressions for name in metrics_in(expr)}
    assert [declared.name for declared in DECLARATIONS.values() if not names & set(declared.series)] == []


def test_every_alert_has_a_section_in_the_docs():
    text = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == set(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.prometheus
@pytest.mark.parametrize("command", [["check", "rules", "recording.yml", "alerts.yml"], ["test", "rules", "tests.yml"]])
def test_promtool_accepts_the_rules(command):
    done = subprocess.run(["promtool", *command], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_promtool_accepts_the_configuration():
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=RULES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
