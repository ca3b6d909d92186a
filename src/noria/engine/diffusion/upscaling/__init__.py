"""The enlarging of latents and of pixels: between two passes, or of an image that is sent."""
