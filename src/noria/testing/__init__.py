"""Fakes for tests, examples and simulations: an executor and a clock (here), and a whole engine.

Part of the public API.
"""
