"""Decides for several devices: which replica gets a request, and how many replicas there are."""
