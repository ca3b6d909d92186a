"""Benchmarks of Noria: reproduce the project's measurements on any machine."""
