"""The runtime for diffusion models: loads them, measures their costs and executes iterations on one device."""
