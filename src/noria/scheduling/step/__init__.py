"""The step scheduler: the running batch of images. PURE."""
