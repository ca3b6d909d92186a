"""Grafana's dashboards, built from code: `noria dashboards build`."""
