"""The mathematics of denoising: diffusers' schedulers compiled to tables, noise per image, one step for all images."""
