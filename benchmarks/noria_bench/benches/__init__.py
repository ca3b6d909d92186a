"""A module a bench."""
