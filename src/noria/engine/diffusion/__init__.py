"""The engine's runtime for diffusion models: executes iterations on one device."""
