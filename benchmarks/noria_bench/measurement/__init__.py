"""Measurements during and after a run, and the format of results."""
