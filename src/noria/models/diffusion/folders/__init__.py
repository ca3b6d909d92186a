"""Checks of the folders of diffusion models in diffusers format, a module for each family; none knows torch."""
