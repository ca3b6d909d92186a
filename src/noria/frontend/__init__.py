"""The front-end process: HTTP in, image files out. Never imports torch, diffusers or the engine."""
