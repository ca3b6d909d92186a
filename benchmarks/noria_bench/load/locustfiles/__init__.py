"""Scenarios for Locust."""
