"""PROCESS: protocols in, bytes out. Never imports torch, diffusers or the engine."""
