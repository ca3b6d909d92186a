"""Webhooks: signed, retried until the receiver accepts them."""
