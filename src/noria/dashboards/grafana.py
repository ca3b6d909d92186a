"""Converts a dashboard to Grafana's JSON (schema version 41, Grafana 12)."""

from typing import Any

from noria.dashboards.panels import WIDTH, Dashboard, Panel, Query

_SCHEMA_VERSION = 41
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ROW_HEIGHT = 1
_SERIES = '{__name__=~"noria_stat_.+_(count|total)"}'


def to_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON document that Grafana imports or provisions."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": list(dashboard.tags),
        "schemaVersion": _SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "15s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": list(dashboard.tags), "title": "Noria", "asDropdown": False}],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _choice("instance", "Server", "label_values(noria_machine_cores, instance)"),
                *(_choice(each, each.capitalize(), f"label_values({_SERIES}, {each})") for each in dashboard.labels),
            ]
        },
        "panels": _panels(dashboard),
    }


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,  # with the time range
    }


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; a new line where one does not fit."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        grid_position = {"x": 0, "y": y, "w": WIDTH, "h": _ROW_HEIGHT}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": grid_position, "panels": []}
        )
        x, y, line_height = 0, y + _ROW_HEIGHT, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, line_height = 0, y + line_height, 0
            grid_position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            panels.append({"id": len(panels) + 1, "gridPos": grid_position, **_panel(panel)})
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal"} if panel.stacked else {"mode": "none"}
        custom = {"stacking": stacking, "fillOpacity": 25 if panel.stacked else 8, "showPoints": "never"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    elif panel.kind == "state-timeline":
        custom = {"lineWidth": 0, "fillOpacity": 80}
        options = {"showValue": "never", "mergeValues": True, "legend": {"showLegend": False}}
    else:
        options = {"calculate": False, "yAxis": {"unit": "short"}}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.kind == "state-timeline":
        steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
    elif panel.threshold is not None:
        steps.append({"color": "red", "value": panel.threshold})
    defaults = {"unit": panel.unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
    }


def _target(query: Query, index: int, panel: Panel) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "exemplar": query.exemplars,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": panel.kind == "stat",
        "range": panel.kind != "stat",
    }
