"""Distributions that versions are compared with, and what a server has counted."""
