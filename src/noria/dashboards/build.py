"""`noria dashboards build`: writes the dashboards for Grafana; fails if a panel queries an undeclared metric."""

import json
import pathlib
from collections.abc import Callable

from noria.dashboards.container import CONTAINER
from noria.dashboards.gpu import GPU
from noria.dashboards.grafana import to_grafana
from noria.dashboards.panels import Dashboard
from noria.dashboards.promql import metrics_in
from noria.dashboards.service import SERVICE
from noria.dashboards.variables import STATISTICS
from noria.errors import ConfigError, did_you_mean
from noria.folders import shipped_folder
from noria.observe.metrics.declarations import DECLARATIONS

RULES = ("alerts.yml", "recording.yml")
DASHBOARDS = (SERVICE, CONTAINER, GPU, STATISTICS)


def build(folder: pathlib.Path, report: Callable[[str], None]) -> None:
    """Write each dashboard into `folder`, which is created if it does not exist.

    Raises ConfigError: a panel queries a metric that is not declared, or a file cannot be written.
    """
    for dashboard in DASHBOARDS:
        check_metrics(dashboard)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for dashboard in DASHBOARDS:
            file = folder / f"{dashboard.uid}.json"
            file.write_text(json.dumps(to_grafana(dashboard), indent=1) + "\n", encoding="utf-8")
            report(f"wrote {file}")
    except OSError as error:
        raise ConfigError(
            f"the dashboards cannot be written to {folder}: {error}. Choose a writable folder."
        ) from error


def write_rules(folder: pathlib.Path, report: Callable[[str], None], docs_url: str = "") -> None:
    """Write the rules for Prometheus, which the dashboards query and which raise alerts, into `folder`.

    `docs_url` comes before `docs/` in each alert's `runbook_url`.

    Raises ConfigError: this installation has none, or a file cannot be written.
    """
    if (source := shipped_folder("dashboards/prometheus", "deploy/prometheus", RULES[0])) is None:
        raise ConfigError("this installation has no rules; the wheel of noria-serve and a clone have them.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in RULES:
            text = (source / name).read_text(encoding="utf-8")
            if docs_url:
                text = text.replace("runbook_url: docs/", f"runbook_url: {docs_url.rstrip('/')}/docs/")
            (folder / name).write_text(text, encoding="utf-8")
            report(f"wrote {folder / name}")
    except OSError as error:
        raise ConfigError(f"the rules cannot be written to {folder}: {error}. Choose a writable folder.") from error


def check_metrics(dashboard: Dashboard) -> None:
    """Raise ConfigError if a panel queries a metric that is not declared."""
    known_metrics = [name for declared in DECLARATIONS.values() for name in declared.series]
    for row in dashboard.rows:
        for panel in row.panels:
            for query in panel.queries:
                for name in metrics_in(query.expr):
                    if name not in known_metrics:
                        raise ConfigError(
                            f"the panel {panel.title!r} of {dashboard.title!r} queries {name!r}, which is not declared "
                            f"in observe/metrics/declarations.py.{did_you_mean(name, known_metrics)}"
                        )
