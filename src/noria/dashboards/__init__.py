"""Grafana dashboards, built from code: `noria dashboards build`."""
