"""Noria: a server for diffusion models whose batch never stops turning."""

__version__ = "0.1.0"
