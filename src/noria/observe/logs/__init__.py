"""Structured logs of every process."""
