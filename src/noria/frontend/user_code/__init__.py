"""Endpoints with code of the operator's: loaded from a file, replaced when it changes, called within limits."""
