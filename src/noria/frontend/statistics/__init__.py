"""Counts variables of requests and results."""
