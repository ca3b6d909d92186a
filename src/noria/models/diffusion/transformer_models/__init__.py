"""Diffusion models whose denoiser is a transformer. It predicts a velocity, but in PixArt-Σ noise."""
