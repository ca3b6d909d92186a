"""The versions of a model: which one answers a request, and copies of requests for shadows."""
