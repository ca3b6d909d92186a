"""A module a protocol: HTTP in, services called, HTTP out."""
