"""Benches that re-make the project's measured claims on the user's own machine."""
