"""Diffusion models whose denoiser is a UNet."""
