"""Webhooks: signed, delivered until they arrive."""
