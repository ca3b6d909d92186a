"""Families of diffusion models, a module for each."""
