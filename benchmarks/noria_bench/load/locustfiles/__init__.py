"""Locust files of the scenarios."""
