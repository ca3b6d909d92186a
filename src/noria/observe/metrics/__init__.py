"""Metrics: declared once, merged over processes, exported."""
