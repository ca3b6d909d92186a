"""Traces: spans of a request across processes."""
