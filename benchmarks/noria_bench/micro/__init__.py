"""Microbenchmarks of single parts, run as scripts."""
