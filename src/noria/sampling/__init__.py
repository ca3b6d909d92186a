"""The mathematics of denoising: diffusers' schedulers compiled to tables, each image's noise, and the one step for all of them."""
