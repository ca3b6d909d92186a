"""Noria: a server for diffusion models with continuous batching."""

__version__ = "0.1.0"
