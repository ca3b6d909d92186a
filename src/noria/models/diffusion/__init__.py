"""Diffusion model families."""
