"""Benches that re-make the project's claims on the user's own machine; each writes one JSON file and prints one table."""
